"""Compiled programs read from text: what runs how often, and what it sends."""
# ruff: noqa: E501  lines as XLA prints them

import dataclasses

import pytest

from scalerl_jax.preflight import hlo
from scalerl_jax.preflight.collectives import traffic
from scalerl_jax.preflight.hlo import head_matmuls, scope_matmuls

# Two nested loops: an outer one of 3 turns, and in each a counter from 2 to 10 in
# steps of 2, hence 4.  Attributes with line ends in them, as kernels have.
NESTED = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_cond (c: (s32[], f32[8,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(10)
  %c = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %bound), direction=LT
}

%inner_body (d: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %d = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %two = s32[]{:T(128)} constant(2)
  %now = s32[]{:T(128)} get-tuple-element(%d), index=0
  %next = s32[]{:T(128)} add(%now, %two)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%d), index=1
  %kernel = f32[8,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="f"}
  %sent = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%kernel), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %got = f32[8,128]{1,0:T(8,128)} collective-permute-done(%sent)
  ROOT %out = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%next, %got)
}

%outer_cond (e: (s32[], f32[8,128])) -> pred[] {
  %three = s32[] constant(3)
  %e = (s32[], f32[8,128]) parameter(0)
  %turn = s32[] get-tuple-element(%e), index=0
  ROOT %go = pred[] compare(%turn, %three), direction=LT
}

%outer_body (g: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %g = (s32[], f32[8,128]) parameter(0)
  %one = s32[] constant(1)
  %first = s32[] constant(2)
  %turn.1 = s32[] get-tuple-element(%g), index=0
  %after = s32[] add(%turn.1, %one)
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%g), index=1
  %packed = (s32[], f32[8,128]) tuple(%first, %y)
  %loop = (s32[], f32[8,128]) while(%packed), condition=%inner_cond, body=%inner_body
  %z = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %all = f32[8,128]{1,0:T(8,128)} all-reduce(%z), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %both = (s32[], f32[8,128]) tuple(%after, %all)
}

ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[8,128]) tuple(%zero, %p)
  %outer = (s32[], f32[8,128]) while(%begin), condition=%outer_cond, body=%outer_body
  ROOT %end = f32[8,128]{1,0:T(8,128)} get-tuple-element(%outer), index=1
}
"""


def module(lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"{before}ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n")


def test_what_is_in_loops_runs_as_often_as_they_turn():
    times = {each.name: n for each, _, n in hlo.parse(NESTED).runs()}
    assert times["outer"] == 1
    assert times["all"] == 3
    assert times["kernel"] == 3 * 4


def test_collectives_are_counted_with_their_loops_and_once_for_start_and_done():
    found = traffic(hlo.parse(NESTED), num_devices=8)
    size = 8 * 128 * 4
    assert set(found) == {"all-reduce", "collective-permute"}
    assert found["collective-permute"].count == 12
    assert found["collective-permute"].sent_bytes == 12 * size
    # A ring of 4 sends 3/4 of the array to reduce it and 3/4 to hand it round.
    assert found["all-reduce"].count == 3
    assert found["all-reduce"].bytes == 3 * size
    assert found["all-reduce"].sent_bytes == 3 * 2 * size * 3 / 4


def test_a_trip_count_that_xla_states_is_taken():
    text = NESTED.replace(
        "condition=%outer_cond, body=%outer_body",
        'condition=%outer_cond, body=%outer_body, backend_config={"known_trip_count":'
        '{"n":"7"}}',
    )
    times = {each.name: n for each, _, n in hlo.parse(text).runs()}
    assert times["all"] == 7


@pytest.mark.parametrize(
    "line, kind, sent",
    [
        pytest.param(
            "%x = bf16[64,4]{1,0} all-gather(%p), channel_id=1, "
            "replica_groups={{0,1,2,3}}, dimensions={0}",
            "all-gather",
            64 * 4 * 2 * 3 / 4,
            id="all-gather: what it lacks",
        ),
        pytest.param(
            "%x = f32[16,4]{1,0} reduce-scatter(%p), channel_id=1, "
            "replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add",
            "reduce-scatter",
            4 * 16 * 4 * 4 * 3 / 4,
            id="reduce-scatter: of the whole operand, groups as a range",
        ),
        pytest.param(
            "%x = f32[64,4]{1,0} all-to-all(%p), channel_id=1, "
            "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}",
            "all-to-all",
            64 * 4 * 4 * 3 / 4,
            id="all-to-all: groups as axes of a mesh",
        ),
        pytest.param(
            "%x = (f32[16]{0}, f32[64]{0}) all-gather-start(%p), channel_id=1, "
            "replica_groups={{0,1,2,3}}",
            "all-gather",
            64 * 4 * 3 / 4,
            id="an asynchronous one: its result, not its operand too",
        ),
        pytest.param(
            "%x = ((f32[16]{0}, f32[8]{0}), (f32[64]{0}, f32[32]{0})) "
            "all-gather-start(%p, %q), channel_id=1, replica_groups={{0,1,2,3}}",
            "all-gather",
            (64 + 32) * 4 * 3 / 4,
            id="an asynchronous one of two arrays: both results",
        ),
        pytest.param(
            "%x = ((f32[64]{0}, f32[32]{0}), (f32[16]{0}, f32[8]{0})) "
            "reduce-scatter-start(%p, %q), channel_id=1, replica_groups={{0,1,2,3}}",
            "reduce-scatter",
            (64 + 32) * 4 * 3 / 4,
            id="reduce-scatter: a start has the whole operands",
        ),
    ],
)
def test_what_a_device_sends_by_kind(line, kind, sent):
    (found,) = traffic(module([line]), num_devices=8).items()
    assert found[0] == kind
    assert found[1].sent_bytes == sent


def test_pieces_of_one_collective_in_several_fusions_count_once():
    pieces = "".join(
        f"%piece.{n} (q: f32[16]) -> f32[64] {{\n"
        f"  %g.{n} = f32[64]{{0}} all-gather(%q), channel_id=5, "
        f"replica_groups={{{{0,1,2,3}}}}\n}}\n\n"
        for n in range(3)
    )
    lines = [f"%f.{n} = f32[64]{{0}} fusion(%p), calls=%piece.{n}" for n in range(3)]
    assert traffic(module(lines, pieces), num_devices=4)["all-gather"].count == 1


def test_an_all_reduce_that_keeps_a_shard_alone_is_a_reduce_scatter():
    inside = (
        "%all-reduce-scatter.1 (q: f32[64]) -> f32[16] {\n"
        "  %r = f32[64]{0} all-reduce(%q), channel_id=3, replica_groups={{0,1,2,3}}\n"
        "  ROOT %s = f32[16]{0} dynamic-slice(%r, %i)\n}\n\n"
    )
    lines = ["%f = f32[16]{0} fusion(%p), calls=%all-reduce-scatter.1"]
    found = traffic(module(lines, inside), num_devices=4)
    assert set(found) == {"reduce-scatter"}
    assert found["reduce-scatter"].sent_bytes == 64 * 4 * 3 / 4


def test_a_collective_of_one_device_sends_nothing():
    line = "%x = f32[64]{0} all-reduce(%p), channel_id=1, replica_groups={{0},{1}}"
    assert traffic(module([line]), num_devices=2) == {}


@pytest.mark.parametrize(
    "shape, size",
    [
        pytest.param("bf16[2,3]{1,0:T(8,128)(2,1)}", 12, id="bfloat16"),
        pytest.param("pred[8]{0}", 8, id="a byte for each truth"),
        pytest.param("(f32[4]{0}, /*index=1*/s32[]{:T(128)})", 20, id="a tuple"),
        pytest.param("f8e4m3fn[16]{0}", 16, id="an 8-bit float"),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert hlo.shape_bytes(shape) == size


HEAD = [
    "%h = bf16[64,32]{1,0} parameter(0)",
    "%w = f32[500,32]{1,0} parameter(1)",
    "%ffn = bf16[64,96]{1,0} convolution(%h, %up), dim_labels=bf_io->bf",
]
EXACT = ", operand_precision={highest,highest}"
HIGH = ", operand_precision={high,high}"


@pytest.mark.parametrize(
    "line, expected, below, of_gradients",
    [
        pytest.param(
            f"%l = f32[64,500]{{1,0}} dot(%h, %w), lhs_contracting_dims={{1}}{EXACT}",
            *((1, 0, 0), 0, 0),
            id="float32 at the highest precision",
        ),
        pytest.param(
            f"%l = f32[64,500]{{1,0}} dot(%h, %w), lhs_contracting_dims={{1}}{HIGH}",
            *((0, 1, 0), 1, 0),
            id="float32 at the high precision",
        ),
        pytest.param(
            "%l = f32[64,500]{1,0} dot(%h, %w), lhs_contracting_dims={1}",
            *((0, 0, 1), 1, 1),
            id="float32 at the default precision",
        ),
        pytest.param(
            f"%l = bf16[64,500]{{1,0}} convolution(%h, %w), dim_labels=bf_oi->bf{EXACT}",
            *((0, 0, 1), 1, 1),
            id="a result in bfloat16",
        ),
        pytest.param(
            f"%g = f32[64,32]{{1,0}} dot(%z, %w), lhs_contracting_dims={{1}}{EXACT}",
            *((1, 0, 0), 0, 0),
            id="the vocabulary in an operand only",
        ),
    ],
)
def test_the_heads_precision_is_read_from_its_matmuls(
    line, expected, below, of_gradients
):
    found = head_matmuls(module([*HEAD, line]), vocabulary={500})
    assert dataclasses.astuple(found) == expected
    assert found.below_float32() == below
    assert found.below_float32(gradients=True) == of_gradients


def test_a_program_without_a_head_has_none_below_float32():
    found = head_matmuls(module(HEAD), vocabulary={500})
    assert dataclasses.astuple(found) == (0, 0, 0)
    assert found.below_float32() == 0


@pytest.mark.parametrize(
    "shape, attributes, highest, lower",
    [
        pytest.param("f32[64,96]", f"{EXACT}", 1, 0, id="highest"),
        pytest.param("f32[64,96]", "", 0, 1, id="the default precision"),
        pytest.param("bf16[64,96]", f"{EXACT}", 0, 1, id="a bfloat16 result"),
    ],
)
def test_products_of_a_scope_are_found_by_its_name(shape, attributes, highest, lower):
    named = 'metadata={op_name="jit(f)/transpose(jvp(router))/dot_general"}'
    other = 'metadata={op_name="jit(f)/routers/dot_general"}'
    line = f"{shape}{{1,0}} dot(%h, %w), lhs_contracting_dims={{1}}{attributes}"
    lines = [f"%r = {line}, {named}", f"%q = {line}, {other}"]
    found = scope_matmuls(module([*HEAD, *lines]), "router")
    assert (found.highest, found.lower) == (highest, lower)


@pytest.mark.parametrize(
    "line, sent, dcn",
    [
        pytest.param(
            "%x = f32[64]{0} all-reduce(%p), channel_id=1, replica_groups={{0,4},{1,5},"
            "{2,6},{3,7}}, to_apply=%add",
            0,
            2 * 64 * 4 / 2,
            id="each with its like: all of it goes between slices",
        ),
        pytest.param(
            "%x = f32[64]{0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[2,4]"
            "T(1,0), to_apply=%add",
            0,
            2 * 64 * 4 / 2,
            id="the same, written as a range",
        ),
        pytest.param(
            "%x = f32[64]{0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8]",
            2 * 64 * 4 * 3 / 4,
            2 * 16 * 4 / 2,
            id="all: within slices, then a shard between them",
        ),
        pytest.param(
            "%x = f32[64]{0} all-gather(%p), channel_id=1, "
            "replica_groups=mesh['a'=2,'b'=4] {'b'}",
            64 * 4 * 3 / 4,
            0,
            id="within slices",
        ),
        pytest.param(
            "%x = f32[64]{0} all-gather(%p), channel_id=1, "
            "replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'c'}",
            64 * 4 * 1 / 2,
            32 * 4 * 1 / 2,
            id="every other device, by axes of a mesh whose order is told",
        ),
        pytest.param(
            "%x = f32[64]{0} collective-permute(%p), channel_id=1, "
            "source_target_pairs={{0,1},{1,4},{4,0}}",
            0,
            64 * 4,
            id="a permutation of which a part goes there",
        ),
        pytest.param(
            "%x = (f32[48,8]{1,0}, u32[], token[]) send(%p, %q), channel_id=1, "
            'is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x'
            '{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}',
            0,
            2 * 48 * 8 * 4 / 2,
            id="as TPUs compile it: a send to the runtime that joins slices",
        ),
    ],
)
def test_what_a_device_sends_to_another_slice(line, sent, dcn):
    (found,) = traffic(module([line]), num_devices=8, num_slices=2).values()
    assert (found.sent_bytes, found.dcn_bytes) == (sent, dcn)
