"""What ranks must hold, against parameters put together plainly, and against the whole."""

import itertools
import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import ManifestMismatchError, VerificationError
from rl_core.layout import Constant, LayoutSpec, Parameter, Part, Rotary, match
from rl_core.metadata import Manifest, TensorMeta
from rl_core.rollout.expected_digests import assemble, buffer_of, expected_digests
from rl_core.rollout.live_check import check_live
from rl_core.rollout.live_digests import Live, digests_of, live_tensors
from rl_core.rollout.rank_plan import RankPlan
from rl_core.torch import _CHUNK, WordSum, as_bytes, content_digest, dtype_of, meta_of
from rl_core.versions import PolicyVersion

HEAD = 4
ATTENTION = tuple(
    Part(f"l.{{layer}}.{part}_proj", cut)
    for part, cut in (("q", "rows"), ("k", "kv_heads"), ("v", "kv_heads"))
)
TABLE = (
    Parameter("embed", (Part("embed", "vocabulary"),), pad=8),
    Parameter("head", (Part("embed", "vocabulary"),), pad=8),
    Parameter("l.{layer}.qkv", ATTENTION),
    Parameter("l.{layer}.o", (Part("l.{layer}.o_proj", "columns"),)),
    Parameter("l.{layer}.norm", (Part("l.{layer}.norm"),), change="plus_one"),
    Parameter(
        "l.{layer}.w13",
        (Part("l.{layer}.e.{expert}.gate", "rows"), Part("l.{layer}.e.{expert}.up", "rows")),
        pad=4,
    ),
    Parameter("l.{layer}.w2", (Part("l.{layer}.e.{expert}.down", "columns"),), pad=4),
)


@st.composite
def models(draw):
    """A model of random sizes, ranks that it can be cut for, and its spec."""
    tp = draw(st.sampled_from([1, 2, 4]))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv * draw(st.sampled_from([1, 2])) * tp
    hidden, wide = 4 * draw(st.integers(1, 3)), tp * draw(st.integers(1, 5))
    layers, experts = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 11]))
    shapes = {"embed": (draw(st.integers(1, 40)), hidden)}
    for layer in range(layers):
        shapes |= {
            f"l.{layer}.q_proj": (heads * HEAD, hidden),
            f"l.{layer}.k_proj": (kv * HEAD, hidden),
            f"l.{layer}.v_proj": (kv * HEAD, hidden),
            f"l.{layer}.o_proj": (hidden, heads * HEAD),
            f"l.{layer}.norm": (hidden,),
        }
        for expert in range(experts):
            start = f"l.{layer}.e.{expert}."
            shapes |= {start + "gate": (wide, hidden), start + "up": (wide, hidden)}
            shapes[start + "down"] = (hidden, wide)
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    spec = LayoutSpec("test", "Test", "cpu", dtype, layers, kv, TABLE)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return spec, tensors, tp


def manifest_of(tensors):
    return Manifest(PolicyVersion(1, 0), tuple(meta_of(n, t) for n, t in tensors.items()))


def stream(tensors, names=None):
    return ((meta_of(name, tensors[name]), tensors[name]) for name in names or tensors)


def ranks_of(spec, tensors, tp):
    """Every parameter of every rank, put together."""
    plans = [RankPlan(spec, manifest_of(tensors), rank, tp) for rank in range(tp)]
    return [{name: assemble(plan, name, tensors) for name in plan.parameters} for plan in plans]


@settings(max_examples=25)
@given(models(), st.randoms(use_true_random=False))
def test_digests_are_those_of_the_assembled_parameters_in_any_order(model, shuffler):
    spec, tensors, tp = model
    names = list(tensors)
    shuffler.shuffle(names)
    manifest = manifest_of(tensors)
    found = expected_digests(stream(tensors, names), manifest, spec, range(tp), tp)
    for expectation, rank in zip(found, ranks_of(spec, tensors, tp), strict=True):
        assert not expectation.unverifiable
        assert expectation.tensors.keys() == rank.keys()
        for name, tensor in rank.items():
            held = expectation.tensors[name]
            assert (held.shape, held.dtype) == (tuple(tensor.shape), spec.dtype)
            assert held.digest == content_digest(meta_of(name, tensor), tensor, "wsum64")


@settings(max_examples=25)
@given(models())
def test_the_slices_of_all_ranks_make_up_the_whole(model):
    """Written against the tensors, not against the plan: rows, columns, heads, padding, stacks."""
    spec, tensors, tp = model
    ranks = ranks_of(spec, tensors, tp)
    cast = {name: tensor.to(dtype_of(spec.dtype)) for name, tensor in tensors.items()}
    vocabulary = torch.cat([rank["embed"] for rank in ranks])
    size = len(cast["embed"])
    assert torch.equal(vocabulary[:size], cast["embed"])
    assert not vocabulary[size:].any()
    assert len(vocabulary) % tp == 0
    for layer in range(spec.layers):
        at = f"l.{layer}."
        q, k, v = split_qkv([rank[at + "qkv"] for rank in ranks], len(cast[at + "q_proj"]) // tp)
        assert torch.equal(torch.cat(q), cast[at + "q_proj"])
        for kind, parts in (("k_proj", k), ("v_proj", v)):
            copies = max(1, tp // spec.kv_heads)
            assert torch.equal(torch.cat(parts[::copies]), cast[at + kind])
            for start in range(0, tp, copies):  # the same head on all of these ranks
                assert all(torch.equal(parts[start], parts[start + n]) for n in range(copies))
        assert torch.equal(torch.cat([rank[at + "o"] for rank in ranks], 1), cast[at + "o_proj"])
        assert all(torch.equal(rank[at + "norm"], cast[at + "norm"] + 1) for rank in ranks)
        check_experts(cast, [rank[at + "w13"] for rank in ranks], [r[at + "w2"] for r in ranks], at)
    for rank in ranks:  # a tied head is the embedding
        assert torch.equal(rank["head"], rank["embed"])


def split_qkv(fused, queries):
    rest = [rank[queries:] for rank in fused]
    return (
        [rank[:queries] for rank in fused],
        [part[: len(part) // 2] for part in rest],
        [part[len(part) // 2 :] for part in rest],
    )


def check_experts(cast, w13, w2, at):
    for expert in range(len(w13[0])):
        gate, up, down = (cast[f"{at}e.{expert}.{kind}"] for kind in ("gate", "up", "down"))
        mine = len(gate) // len(w13)
        halves = [rank[expert].chunk(2) for rank in w13]
        assert torch.equal(torch.cat([first[:mine] for first, _ in halves]), gate)
        assert torch.equal(torch.cat([second[:mine] for _, second in halves]), up)
        assert torch.equal(torch.cat([rank[expert][:, :mine] for rank in w2], 1), down)
        assert not any(half[mine:].any() for pair in halves for half in pair)
        assert not any(rank[expert][:, mine:].any() for rank in w2)


SPEC = LayoutSpec("test", "Test", "cpu", "float32", 1, 2, TABLE, unused=("tied.head",))
TENSORS = {
    name: torch.arange(float(torch.Size(shape).numel())).view(shape)
    for name, shape in {
        "embed": (10, 4),
        "l.0.q_proj": (16, 4),
        "l.0.k_proj": (8, 4),
        "l.0.v_proj": (8, 4),
        "l.0.o_proj": (4, 16),
    }.items()
}


def expected(tensors, spec=SPEC, tp=1, metas=None):
    manifest = manifest_of(tensors) if metas is None else Manifest(PolicyVersion(1, 0), metas)
    return expected_digests(stream(tensors), manifest, spec, [0], tp)[0]


def test_what_the_table_does_not_cover_is_named_and_never_expected():
    found = expected({**TENSORS, "l.0.adapter": torch.zeros(2), "tied.head": torch.zeros(3)})
    assert list(found.unverifiable) == ["l.0.adapter"]
    assert "no row" in found.unverifiable["l.0.adapter"]
    assert "l.0.adapter" not in found.tensors


def test_a_fused_parameter_of_which_a_part_is_missing_is_unverifiable():
    without = {name: tensor for name, tensor in TENSORS.items() if name != "l.0.k_proj"}
    found = expected(without)
    assert "l.0.k_proj" in found.unverifiable["l.0.qkv"]
    assert "l.0.qkv" not in found.tensors


@pytest.mark.parametrize(
    "change", [{"target": "draft"}, {"quantisation": "fp8"}], ids=["draft", "quantised"]
)
def test_what_is_not_a_plain_tensor_of_the_policy_is_unverifiable(change):
    metas = tuple(
        msgspec.structs.replace(meta_of(name, tensor), **(change if name == "embed" else {}))
        for name, tensor in TENSORS.items()
    )
    found = expected(TENSORS, metas=metas)
    assert list(found.unverifiable) == ["embed"]
    assert not {"embed", "head"} & found.tensors.keys()


def test_a_tensor_is_found_under_its_aliases():
    """A tied pair may travel under either name."""
    table = (Parameter("embed", (Part("embed"),)), Parameter("head", (Part("head"),)))
    spec = msgspec.structs.replace(SPEC, parameters=table)
    tensors = {"head": TENSORS["embed"]}
    metas = (msgspec.structs.replace(meta_of("head", tensors["head"]), aliases=("embed",)),)
    found = expected(tensors, spec, metas=metas)
    assert not found.unverifiable
    both = expected({"embed": TENSORS["embed"], "head": TENSORS["embed"]}, spec)
    digests = [{name: held.digest for name, held in one.tensors.items()} for one in (found, both)]
    assert digests[0] == digests[1]


def test_sizes_that_cannot_be_cut_are_named():
    odd = {**TENSORS, "l.0.o_proj": torch.zeros(4, 15)}
    assert "15 is not divisible by 2" in expected(odd, tp=2).unverifiable["l.0.o"]


def test_a_rank_with_nothing_but_padding_is_made_of_nothing():
    """Whatever is done to the weights, it does not change."""
    few = {**TENSORS, "embed": TENSORS["embed"][:3]}
    spec = msgspec.structs.replace(SPEC, parameters=TABLE[:1])
    first, second = expected_digests(stream(few), manifest_of(few), spec, range(2), 2)
    assert first.tensors["embed"].sources == ("embed",)
    assert second.tensors["embed"].sources == ()
    zeros = torch.zeros(4, 4)
    assert second.tensors["embed"].digest == content_digest(
        meta_of("embed", zeros), zeros, "wsum64"
    )
    plan = RankPlan(spec, manifest_of(few), 1, 2)
    assert torch.equal(assemble(plan, "embed", few), zeros)


def test_a_stream_that_is_not_the_manifest_is_refused():
    short = {name: tensor for name, tensor in TENSORS.items() if name != "embed"}
    with pytest.raises(ManifestMismatchError, match="embed"):
        expected_digests(stream(short), manifest_of(TENSORS), SPEC, [0], 1)
    wrong = {**TENSORS, "foreign": torch.zeros(1)}
    with pytest.raises(ManifestMismatchError, match="foreign"):
        expected_digests(stream(wrong), manifest_of(TENSORS), SPEC, [0], 1)


def test_minus_zero_is_zero_only_where_the_table_says_so():
    plain = LayoutSpec("t", "T", "cpu", "float32", 1, 1, (Parameter("w", (Part("w"),)),))
    lost = msgspec.structs.replace(
        plain, parameters=(Parameter("w", (Part("w"),), change="unsigned_zeros"),)
    )
    plus, minus = {"w": torch.zeros(2)}, {"w": -torch.zeros(2)}
    assert expected(plus, plain) != expected(minus, plain)
    assert expected(plus, lost) == expected(minus, lost)


def test_buffers_are_named_in_every_layer_that_has_them():
    rows = (
        Constant("l.{layer}.scale", 1.0, (), "float32"),
        Rotary("l.{layer}.rope", 8, 16, 10000.0, "bfloat16", layers=(1,)),
    )
    spec = LayoutSpec("t", "T", "cpu", "float32", 2, 1, (), rows)
    found = expected({}, spec)
    assert list(found.tensors) == ["l.0.scale", "l.1.scale", "l.1.rope"]
    table = buffer_of(rows[1])
    assert found.tensors["l.1.rope"].digest == content_digest(
        TensorMeta("l.1.rope", (16, 8), "bfloat16"), table, "wsum64"
    )
    assert torch.equal(table[0], torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.bfloat16))
    assert table[3, 4].item() == pytest.approx(torch.tensor(3.0).sin().item(), abs=1e-2)


def test_a_buffer_of_a_layer_that_its_row_leaves_out_is_unverifiable():
    """Such as positions that are scaled in some layers: nothing says that they are wrong."""
    rows = (Rotary("l.{layer}.rope", 8, 16, 10000.0, "bfloat16", layers=(1,)),)
    spec = LayoutSpec("t", "T", "cpu", "float32", 2, 1, (), rows)
    found = expected({}, spec)
    live = {"l.0.rope": "wsum64:0", "l.1.rope": found.tensors["l.1.rope"].digest}
    check = check_live(spec, found, live)
    assert (check.matched, check.unexpected) == (("l.1.rope",), ())
    assert list(check.unverifiable) == ["l.0.rope"]


def test_specs_travel_as_json():
    encoded = msgspec.json.encode(SPEC)
    assert msgspec.json.decode(encoded, type=LayoutSpec) == SPEC
    assert SPEC.covers("l.7.qkv")
    assert not SPEC.covers("l.7.bias")


def test_patterns_match_numbers_only():
    assert match("l.{layer}.w", "l.12.w") == {"layer": 12}
    for other in ("l.x.w", "l.01.w", "lx1xw", "l.1.w2", "l.1.w\n"):
        assert match("l.{layer}.w", other) is None


@settings(max_examples=25)
@given(st.data())
def test_a_digest_is_the_sum_of_its_pieces(data):
    """Pieces of any size, in any order, over the borders of chunks and words."""
    size = data.draw(st.sampled_from([0, 1, 7, 8, 65, 8 * _CHUNK - 3, 8 * _CHUNK, 16 * _CHUNK + 5]))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    content = torch.randint(256, (size,), dtype=torch.uint8)
    edges = [0, *cuts, size]
    pieces = [(start, content[start:end]) for start, end in itertools.pairwise(edges)]
    random.Random(size).shuffle(pieces)
    total = WordSum()
    for start, piece in pieces:
        total.add(start, piece)
    meta = TensorMeta("x", (size,), "uint8")
    assert total.digest(meta) == content_digest(meta, content, "wsum64")


def test_a_digest_of_no_elements():
    meta = TensorMeta("x", (0, 3), "float32")
    assert WordSum().digest(meta) == content_digest(meta, torch.empty(0, 3), "wsum64")
    assert as_bytes(torch.empty(0)).numel() == 0


def test_storage_is_read_once_and_never_taken_for_another():
    """Tensors made for the look come to lie where the one before was."""
    shared = torch.randn(64)
    made = (Live(f"made.{n}", torch.full((64,), float(n)), derived=True) for n in range(4))
    found = digests_of([Live("a", shared), Live("b", shared), *made])
    made = (Live(f"made.{n}", torch.full((64,), float(n)), derived=True) for n in range(4))
    assert digests_of(made) == {name: found[name] for name in found if name.startswith("made")}
    for name in ("a", "b"):
        assert found[name] == content_digest(meta_of(name, shared), shared, "wsum64")


def test_tensors_without_memory_are_named():
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    for gone in (freed, torch.ones(8, device="meta")):
        with pytest.raises(VerificationError, match="gone"):
            digests_of([Live("gone", gone)])


def test_every_tensor_of_a_model_is_live_under_every_name():
    model = torch.nn.Module()
    model.embed, model.head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("table", torch.ones(3), persistent=False)
    model.embed.kv_cache, model.embed.scale = torch.ones(1), torch.ones(2)
    names = [live.name for live in live_tensors(model)]
    assert sorted(names) == ["embed.scale", "embed.weight", "head.weight", "table"]


def test_a_check_sorts_every_name_into_one_place():
    spec = msgspec.structs.replace(SPEC, unknown=("declared",))
    found = expected(TENSORS, spec)
    live = {name: held.digest for name, held in found.tensors.items() if name != "head"}
    live |= {"embed": "wsum64:0", "l.5.o": "wsum64:0", "declared": "wsum64:0", "odd": "wsum64:0"}
    check = check_live(spec, found, live)
    assert not check.clean
    assert check.matched == ("l.0.qkv", "l.0.o")
    assert (check.mismatched, check.missing, check.unexpected) == (
        ("embed",),
        ("head",),
        ("l.5.o",),
    )
    assert list(check.unverifiable) == ["declared", "odd"]
    assert "layout of its own" in check.unverifiable["declared"]
    with pytest.raises(VerificationError, match="different kinds"):
        check_live(spec, found, {"embed": "xxh3-128:00"})
