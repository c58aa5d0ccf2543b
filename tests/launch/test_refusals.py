"""Error texts of Google's clients, and what is made of them.

People have published them: each with the thread on GitHub that has it whole.
"""

import pytest

from scalerl_jax.launch.client import Client, NotFound, refusal
from scalerl_jax.launch.place import Refused

TEXTS = [
    (  # thevasudevgupta/gsoc-wav2vec2, issue 11
        "ERROR: (gcloud.compute.tpus.execution-groups.create) There is no more "
        'capacity in the zone "europe-west4-a"; you can try in another zone where '
        "Cloud TPU Nodes are offered "
        "(see https://cloud.google.com/tpu/docs/regions) [EID: 0xba393c906974e61]",
        Refused,
        "no such machines just now",
    ),
    (  # as requests and urllib3 write it
        "ERROR: gcloud crashed (ConnectionError): HTTPSConnectionPool(host='tpu."
        "googleapis.com', port=443): Max retries exceeded with url: /v2/projects "
        "(Caused by NameResolutionError(...))",
        Refused,
        "the cloud is not reached: ERROR: gcloud crashed (ConnectionError)",
    ),
    (
        "ERROR: (gcloud.storage.cat) There was a problem refreshing your current auth "
        "tokens: HTTPSConnectionPool(host='oauth2.googleapis.com', port=443): Max "
        "retries exceeded\nPlease run:\n\n  $ gcloud auth login\n",
        Refused,
        "the cloud is not reached: ERROR: (gcloud.storage.cat)",
    ),
    (
        "ERROR: (gcloud.storage.cat) There was a problem refreshing your current auth "
        "tokens: ('invalid_grant: Bad Request', {'error': 'invalid_grant'})\n"
        "Please run:\n\n  $ gcloud auth login\n\nto obtain new credentials.",
        ValueError,
        "gcloud has no login here",
    ),
    (
        "ERROR: (gcloud.compute.tpus.queued-resources.describe) HttpError accessing "
        "<https://tpu.googleapis.com/v2/x?alt=json>: response: <{'status': '503'}>",
        Refused,
        "the cloud cannot do this just now",
    ),
    (  # skypilot-org/skypilot, issue 4579
        "Insufficient reserved capacity. Contact customer support to increase your "
        "reservation. [EID: 0x7adf6d58c08b0aa4]",
        Refused,
        "no such machines just now",
    ),
    (  # marin-community/marin, issue 3200
        "ERROR: (gcloud.compute.tpus.tpu-vm.create) HttpError accessing "
        "<https://tpu.googleapis.com/v2/projects/p/locations/us-east5-b/nodes?alt=json>"
        ': response: <{\'status\': 429}>, content <{ "error": { "code": 429, '
        '"message": "Quota limit \'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI\' has '
        'been exceeded. Limit: 0 in region us-east5.", "status": '
        '"RESOURCE_EXHAUSTED"}}>',
        ValueError,
        "no quota: TPUV6EPreemptiblePerProjectPerRegionForTPUAPI is 0 here",
    ),
    (  # marin-community/marin, issue 87
        "Quota 'TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI' exhausted.\n"
        "      Limit 10000 in region us-west4",
        Refused,
        "the quota TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI is used up",
    ),
    (  # firezone/firezone, pull request 7711
        "googleapi: Error 403: Permission denied on 'locations/me-central2' (or it may "
        'not exist). Details: [ { "reason": "LOCATION_POLICY_VIOLATED" } ]',
        ValueError,
        "there is no zone me-central2 with TPUs",
    ),
    (  # dstackai/gpuhunt, issue 98
        "google.api_core.exceptions.PermissionDenied: 403 Location europe-west1-b is "
        "not found or access is unauthorized.",
        ValueError,
        "there is no zone europe-west1-b with TPUs",
    ),
    (  # hashicorp/terraform-provider-google, issue 16883, with another service
        "googleapi: Error 403: Cloud TPU API has not been used in project 321157631455 "
        "before or it is disabled. Enable it by visiting https://console...",
        ValueError,
        "an API of the project is off",
    ),
    (  # tensorflow/tpu, issue 296
        "HttpError 403 when requesting https://tpu.googleapis.com/v1alpha1/projects/p/"
        'locations/us-central1-b/nodes/ai?alt=json returned "Permission '
        "'tpu.nodes.get' denied on 'projects/p/locations/us-central1-b/nodes/ai'\"",
        ValueError,
        "lacks a right",
    ),
    (  # actions/runner-images, issue 6778
        "E0709 10:17:27.723595   34196 memcache.go:265] couldn't get current server "
        'API group list: Get "https://34.1.1.1/api?timeout=32s": getting credentials: '
        "exec: executable gke-gcloud-auth-plugin not found",
        ValueError,
        "kubectl cannot log in to GKE",
    ),
]


@pytest.mark.parametrize(("text", "kind", "words"), TEXTS)
def test_a_published_text_is_understood(text, kind, words):
    error = refusal(text, command=["gcloud"])
    assert type(error) is kind
    assert type(error) is not NotFound
    assert words in str(error)
    assert "\n" not in str(error)


def test_a_client_that_hangs_may_be_called_again(monkeypatch):
    monkeypatch.setattr("scalerl_jax.launch.client._LIMIT_S", 0.1)
    with pytest.raises(Refused, match=r"sleep 600 has not ended within 0\.1 s"):
        Client().run(["sleep", "600"])
