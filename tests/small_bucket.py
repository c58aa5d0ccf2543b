"""A small server that plays the JSON API of Google Cloud Storage, in memory.

It has what its two clients ask for: gcsfs (`STORAGE_EMULATOR_HOST`) and tensorstore
(`TENSORSTORE_GCS_HTTP_URL`).  Writes are atomic, and every one makes a new generation,
as in a real bucket.  https://cloud.google.com/storage/docs/json_api/v1
"""

import base64
import email
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

NEEDS_EXTRA = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="the extra [gcs] is not installed"
)
PAGE = 50  # names of a listing at a time: fewer than a checkpoint has objects


class Bucket:
    """Objects by name, with their generations; requests are counted by kind."""

    def __init__(self, name="bucket"):
        self.name = name
        self.objects = {}  # name -> (bytes, generation)
        self.lock = threading.Lock()
        self.denied = False  # answer everything with 403, or with this status
        self.holding = ""  # uploads to names that have this in them wait
        self.let_go = threading.Event()
        self.uploads = {}
        self.days = {}  # of January, on which an object was written; the first
        self._generations = itertools.count(1_700_000_000_000_000)
        self.written = []  # names, in their order

    def hold(self, part):
        self.holding, self.let_go = part, threading.Event()

    def release(self):
        self.holding = ""
        self.let_go.set()

    def names(self, prefix=""):
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def write(self, name, data, if_generation=None):
        """The metadata of the new object; None: another generation is there."""
        with self.lock:
            before = self.objects.get(name, (b"", 0))[1]
            if if_generation is not None and if_generation != before:
                return None
            self.objects[name] = (bytes(data), next(self._generations))
            self.written.append(name)
        return self.describe(name)

    def delete(self, name, generation=None):
        with self.lock:
            if name not in self.objects:
                return False
            if generation is not None and self.objects[name][1] != generation:
                return False
            del self.objects[name]
            return True

    def describe(self, name):
        with self.lock:
            data, generation = self.objects[name]
        return {
            "kind": "storage#object",
            "bucket": self.name,
            "name": name,
            "size": str(len(data)),
            "generation": str(generation),
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": f"2026-01-{self.days.get(name, 1):02d}T00:00:00.000Z",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            # Opaque to the clients here, who only compare it.
            "crc32c": base64.b64encode(hashlib.sha256(data).digest()[:4]).decode(),
        }

    def list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("pageToken", "")
        items, prefixes = [], []
        for name in self.names(prefix):
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = prefix + rest.split(delimiter)[0] + delimiter
                if folder not in prefixes:
                    prefixes.append(folder)
            elif name > after and query.get("startOffset", "") <= name:
                items.append(name)
        most = min(PAGE, int(query.get("maxResults", PAGE)))
        found = {"kind": "storage#objects", "prefixes": prefixes}
        found["items"] = [self.describe(name) for name in items[:most]]
        if len(items) > most:
            found["nextPageToken"] = items[most - 1]
        return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, message):
        self.reply(status, {"error": {"code": status, "message": message}})

    def read_body(self):
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_any(self):
        body = self.read_body()
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        if self.bucket.denied:
            status = 403 if self.bucket.denied is True else self.bucket.denied
            self.refuse(status, "the caller does not have storage.objects.list access")
            return
        if url.path.startswith("/batch"):
            self.batch(body)
            return
        found = re.fullmatch(
            r"(?:/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", url.path
        )
        if not found:
            self.refuse(404, f"no such method: {self.command} {self.path}")
            return
        bucket, name = (urllib.parse.unquote(part or "") for part in found.groups())
        if bucket != self.bucket.name:
            self.refuse(404, "The specified bucket does not exist.")
        elif url.path.startswith("/upload"):
            self.upload(query, body)
        elif "/rewriteTo/" in name or "/copyTo/" in name:
            self.copy(name)
        else:
            getattr(self, f"on_{self.command.lower()}")(url.path, name, query)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any

    def on_get(self, path, name, query):
        if not name:
            if path.endswith("/o"):
                self.reply(200, self.bucket.list(query))
            else:
                self.reply(200, {"kind": "storage#bucket", "name": self.bucket.name})
            return
        if name not in self.bucket.objects:
            self.refuse(404, f"No such object: {self.bucket.name}/{name}")
            return
        with self.bucket.lock:
            data, generation = self.bucket.objects[name]
        if query.get("ifGenerationNotMatch") == str(generation):
            self.reply(304)
        elif query.get("ifGenerationMatch", str(generation)) != str(generation):
            self.refuse(412, "conditionNotMet")
        elif query.get("alt") != "media":
            self.reply(200, self.bucket.describe(name))
        else:
            self.send_data(data, generation)

    on_head = on_get

    def send_data(self, data, generation):
        """An object's bytes, or the range that is asked for."""
        headers = {
            "x_goog_generation": str(generation),
            "x_goog_stored_content_length": str(len(data)),
            "Content_Type": "application/octet-stream",
        }
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self.reply(200, data, **headers)
            return
        first, last = wanted.groups()
        start = int(first) if first else max(len(data) - int(last), 0)
        end = min(int(last), len(data) - 1) if first and last else len(data) - 1
        if start >= len(data):
            self.refuse(416, "the range is beyond the end")
            return
        headers["Content_Range"] = f"bytes {start}-{end}/{len(data)}"
        self.reply(206, data[start : end + 1], **headers)

    def on_delete(self, path, name, query):
        generation = query.get("generation", query.get("ifGenerationMatch"))
        if self.bucket.delete(name, generation and int(generation)):
            self.reply(204)
        else:
            self.refuse(404, f"No such object: {self.bucket.name}/{name}")

    def upload(self, query, body):
        if "upload_id" in query:
            self.go_on(query["upload_id"], body)
            return
        condition = query.get("ifGenerationMatch")
        condition = int(condition) if condition is not None else None
        kind, name = query["uploadType"], query.get("name")
        if kind == "resumable":
            name = name or json.loads(body)["name"]
            number = str(len(self.bucket.uploads))
            self.bucket.uploads[number] = (name, condition, bytearray())
            host = self.headers["Host"]
            path = self.path.split("?")[0]
            self.reply(200, Location=f"http://{host}{path}?upload_id={number}")
            return
        if kind == "multipart":
            kind = self.headers["Content-Type"]
            message = email.message_from_bytes(
                b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body
            )
            first, second = message.get_payload()
            name = json.loads(first.get_payload(decode=True))["name"]
            body = second_part(body, kind)
        self.store(name, body, condition)

    def go_on(self, number, body):
        """A piece of a resumable upload; the last says how long the whole is."""
        name, condition, data = self.bucket.uploads[number]
        data += body
        total = self.headers.get("Content-Range", "*/*").rpartition("/")[2]
        if total == "*" or len(data) < int(total):
            self.reply(308, Range=f"bytes=0-{len(data) - 1}")
        else:
            self.store(name, data, condition)

    def store(self, name, data, condition):
        if self.bucket.holding and self.bucket.holding in name:
            self.bucket.let_go.wait(300.0)
            self.refuse(503, "try again")  # who asked may be dead by now
            return
        made = self.bucket.write(name, data, condition)
        if made is None:
            self.refuse(412, "At least one of the pre-conditions did not hold.")
        else:
            self.reply(200, made)

    def copy(self, name):
        source, _, rest = re.split(r"/(rewriteTo|copyTo)/b/[^/]+/o/", name)
        with self.bucket.lock:
            data, _ = self.bucket.objects[source]
        made = self.bucket.write(rest, data)
        self.reply(200, {"done": True, "resource": made, **made})

    def batch(self, body):
        """Many deletions in one request, each answered in a part of its own."""
        boundary = "batch_answers"
        parts = []
        for found in re.finditer(
            rb"Content-ID: <([^>]*)>.*?DELETE \S*/o/(\S+) HTTP", body, re.DOTALL
        ):
            name = urllib.parse.unquote(found[2].decode().split("?")[0])
            status = "204 No Content" if self.bucket.delete(name) else "404 Not Found"
            parts.append(
                f"--{boundary}\r\nContent-Type: application/http\r\n"
                f"Content-ID: <response-{found[1].decode()}>\r\n\r\n"
                f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        text = "".join(parts) + f"--{boundary}--\r\n"
        self.reply(
            200, text.encode(), Content_Type=f"multipart/mixed; boundary={boundary}"
        )


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client was killed
            super().handle_error(request, client_address)


def second_part(body, content_type):
    """The bytes of the second part of a multipart body, which may hold anything."""
    boundary = re.search(r'boundary="?([^";]+)', content_type)[1].encode()
    _, _, rest = body.split(b"--" + boundary, 2)
    part = rest.partition(b"\r\n\r\n")[2] or rest.partition(b"\n\n")[2]
    end = part.rindex(b"--" + boundary + b"--")
    part = part[:end]
    return part[:-2] if part.endswith(b"\r\n") else part.removesuffix(b"\n")


@functools.cache
def _served():
    """A bucket and its server, for the life of this process."""
    bucket = Bucket()
    handler = type("Handler", (Handler,), {"bucket": bucket})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    # tensorstore reads it once; neither looks for credentials.
    os.environ |= {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }
    return bucket


def empty():
    """The bucket of this process, and of those that it starts, emptied."""
    bucket = _served()
    with bucket.lock:
        bucket.objects.clear()
        bucket.written.clear()
    bucket.denied = False
    bucket.release()
    return bucket
