"""Observations over meshes of real processes: rows are added up, heads and layers are put side by side."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from ranks import run_ranks  # noqa: E402
from sqrtdk import HeadSummary, SqrtdkError, attention  # noqa: E402
from sqrtdk.statistics import ROW_FIELDS, AttentionStatistics  # noqa: E402
from sqrtdk.summary import SUMMARISED  # noqa: E402
from sqrtdk.torch import Monitor, all_reduce, qk_clip_, watch  # noqa: E402
from sqrtdk.torch.training.distributed import unite  # noqa: E402
from sqrtdk.torch.training.mesh import Ranks  # noqa: E402
from sqrtdk.torch.watch.score_sums import CauseSums  # noqa: E402

# Every way to spread four processes over data, tensor, pipeline and context.
SHAPES = [shape for shape in itertools.product((1, 2, 4), repeat=4) if np.prod(shape) == 4]
NAMES = [("dp", "tp", "pp", "cp"), ("data", "tensor", "stage", "context"), ("dp_shard", "mp", "pipe", "seq")]


def rows_of(seed, stage, layer, part, heads):
    """The rows of a layer on the ranks of one part; the batch may be empty."""
    rng = np.random.default_rng((seed, stage, layer, part))
    q, k, v = rng.standard_normal((3, int(rng.integers(0, 3)), heads, 9, 4))
    return attention(3 * q, k, v, causal=True).statistics


def take_heads(rows, first, last):
    return AttentionStatistics(**{name: getattr(rows, name)[:, first:last] for name in ROW_FIELDS}, first_position=0)


def plan_of(seed, shape):
    """Heads of each layer by stage, and where its shards begin."""
    rng = np.random.default_rng(seed)
    _, shards, stages, _ = shape
    cuts = [[np.cumsum([0, *rng.integers(1, 4, shards)]) for _ in range(rng.integers(1, 3))] for _ in range(stages)]
    return cuts, rng.permutation(4)


def unite_over_grid(rank, world):
    results = []
    for seed, shape in enumerate(SHAPES):
        cuts, order = plan_of(seed, shape)
        names = NAMES[seed % len(NAMES)]
        mesh = init_device_mesh(
            "cpu", tuple(shape[at] for at in order), mesh_dim_names=tuple(names[at] for at in order)
        )
        ranks = Ranks.of(mesh=mesh)
        layers, sums = {}, {}
        for layer, ends in enumerate(cuts[ranks.place.stage]):
            rows = rows_of(seed, ranks.place.stage, layer, ranks.place.part, ends[-1])
            own = take_heads(rows, ends[ranks.place.shard], ends[ranks.place.shard + 1])
            if own.entropy.size:  # else a rank without this layer
                layers[f"layers.{layer}"] = HeadSummary.of(own)
                sums[f"layers.{layer}"] = CauseSums(*np.full((6, layers[f"layers.{layer}"].heads), 1.0 + layer))
        results.append(unite(layers, sums, ranks, step=seed))
    return results


def expected_of(seed, shape):
    data, _, _stages, context = shape
    cuts, _ = plan_of(seed, shape)
    expected = {}
    for stage, layers in enumerate(cuts):
        for layer, ends in enumerate(layers):
            parts = [rows_of(seed, stage, layer, part, ends[-1]) for part in range(data * context)]
            joined = {name: np.concatenate([getattr(one, name) for one in parts]) for name in ROW_FIELDS}
            name = f"layers.{layer}"
            has_twin = sum(layer < len(others) and brings(seed, at, layer, shape) for at, others in enumerate(cuts)) > 1
            if joined["entropy"].size:
                expected[f"stage {stage}: {name}" if has_twin else name] = (
                    HeadSummary.of(AttentionStatistics(**joined, first_position=0)),
                    sum(bool(one.entropy.size) for one in parts) * (1.0 + layer),
                )
    return expected


def brings(seed, stage, layer, shape):
    return any(rows_of(seed, stage, layer, part, 1).entropy.size for part in range(shape[0] * shape[3]))


def assert_same(summary, whole):
    """Integers and extremes to the bit, moments to 1e-12."""
    for name in ("rows_seen", "rows_in_all"):
        np.testing.assert_array_equal(getattr(summary, name), getattr(whole, name))
    for name in SUMMARISED:
        for exact in ("count", "left_out", "histogram", "least", "largest"):
            np.testing.assert_array_equal(getattr(summary[name], exact), getattr(whole[name], exact), err_msg=name)
        np.testing.assert_allclose(summary[name].mean, whole[name].mean, rtol=1e-12, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(summary[name].m2, whole[name].m2, rtol=1e-12, atol=1e-25, err_msg=name)
    for exact in ("offsets", "sequences"):
        np.testing.assert_array_equal(getattr(summary.max_keys, exact), getattr(whole.max_keys, exact))
    np.testing.assert_allclose(summary.max_keys.share_sum, whole.max_keys.share_sum, rtol=1e-12)


@pytest.mark.long
@pytest.mark.slow
def test_every_mesh_of_four_processes_gives_what_one_process_sees(tmp_path):
    results = run_ranks(tmp_path, 4, unite_over_grid)
    for seed, shape in enumerate(SHAPES):
        expected = expected_of(seed, shape)
        for layers, sums in (one[seed] for one in results):
            assert layers.keys() == expected.keys() == sums.keys(), shape
            for name, (whole, queries) in expected.items():
                assert_same(layers[name], whole)
                np.testing.assert_array_equal(sums[name].queries, np.full(whole.heads, queries))


class Attention(nn.Module):
    def __init__(self, width=32, heads=4, key_heads=4):
        super().__init__()
        self.dimension = width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, key_heads * self.dimension) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (-1, self.dimension)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, key_heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.split, self.whole = Attention(key_heads=key_heads), Attention()
        with torch.no_grad():
            self.split.q.weight *= 9.0

    def forward(self, x):
        return self.whole(x + self.split(x))


def inputs(part, parts):
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)).chunk(parts)[part]


def spread(kind, key_heads=4):
    """A model on a mesh, this rank's input, and the mesh."""
    model = Model(key_heads)
    columns = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model.split, mesh, columns)
        return model, inputs(0, 1), None  # DTensors tell it
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(model.split, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, inputs(dist.get_rank(), 2), None
    if kind == "both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model.split, mesh["tp"], columns)
        fully_shard(model.split, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model, inputs(mesh.get_coordinate()[0], 2), None
    if kind == "replicated":
        return nn.parallel.DistributedDataParallel(model), inputs(dist.get_rank(), 2), None
    assert kind in ("by hand", "copied")  # one key, which both ranks hold
    with torch.no_grad():
        rows = slice(16 * dist.get_rank(), 16 * dist.get_rank() + 16)
        for linear in (model.split.q, *((model.split.k, model.split.v) if kind == "by hand" else ())):
            linear.weight, linear.bias = nn.Parameter(linear.weight[rows]), nn.Parameter(linear.bias[rows])
        model.split.o.weight = nn.Parameter(model.split.o.weight[:, rows])
    model.split.o.register_forward_hook(lambda *call: _add_over_ranks(call[2], model.split.o.bias))
    return model, inputs(0, 1), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def _add_over_ranks(output, bias):
    own = (output - bias).detach()
    dist.all_reduce(own)
    return own + bias


def monitor_model(rank, world):
    results = {}
    for kind in ("tensor", "sharded", "replicated", "by hand"):
        entries = []
        model, x, mesh = spread(kind)
        with Monitor(
            model, to=lambda step, entry, entries=entries: entries.append(entry), every=1, mesh=mesh
        ) as monitor:
            model(x)
            monitor.step()
        results[kind] = entries
    return results


@pytest.mark.long
@pytest.mark.slow
def test_a_monitor_of_a_model_on_a_mesh_writes_what_one_of_the_whole_model_writes(tmp_path):
    alone = []
    model = Model()
    with Monitor(model, to=lambda step, entry: alone.append(entry), every=1) as monitor:
        model(inputs(0, 1))
        monitor.step()
    first, second = run_ranks(tmp_path, 2, monitor_model)
    for kind, (entry,) in first.items():
        assert entry["layers"].keys() == alone[0]["layers"].keys(), kind
        for path, layer in alone[0]["layers"].items():
            for name in ("max_logit", "entropy_ratio", "saturation_index", "query_norm"):
                np.testing.assert_allclose(entry["layers"][path][name], layer[name], rtol=1e-4, err_msg=(kind, path))
    assert all(entries == [] for entries in second.values())


# Ways to spread a model over so many ranks, with the number of its keys.
SPREADS = {
    2: [("tensor", 4), ("tensor", 2), ("sharded", 4), ("replicated", 4), ("by hand", 4), ("copied", 1)],
    4: [("both", 4), ("both", 2)],
}


def clip_model(rank, world):
    """The parameters of a clipped model, gathered where they are sharded."""
    results = {}
    for kind, key_heads in SPREADS[world]:
        model, x, mesh = spread(kind, key_heads)
        with watch(model) as seen, torch.no_grad():
            model(x)
        clipped = qk_clip_(model, seen, threshold=0.5, mesh=mesh)
        parameters = {name.removeprefix("module."): whole_of(parameter) for name, parameter in model.named_parameters()}
        results[kind, key_heads] = len(clipped), parameters
    return results


def whole_of(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_clip_on_a_mesh_changes_what_one_process_changes(tmp_path, world):
    ranks = run_ranks(tmp_path, world, clip_model)
    for kind, key_heads in ranks[0]:
        model = Model(key_heads)
        with watch(model) as seen, torch.no_grad():
            model(inputs(0, 1))
        alone = qk_clip_(model, seen, threshold=0.5)
        assert len(alone) > 4
        for name, expected in model.named_parameters():
            parts = [results[kind, key_heads][1][name] for results in ranks]
            if parts[0].shape == expected.shape:
                for part in parts:
                    torch.testing.assert_close(part, expected.detach(), rtol=1e-5, atol=1e-7, msg=f"{kind}: {name}")
            else:
                axis = int(parts[0].shape[0] == expected.shape[0])
                torch.testing.assert_close(torch.cat(parts, axis), expected.detach(), rtol=1e-5, atol=1e-7, msg=name)


def see_a_layer_late(rank, world):
    """A layer that one rank sees a step later, after its parameters have changed on both."""
    model, x, _ = spread("replicated")
    ranks, rows = Ranks.of(model=model), []
    for step in range(2):
        with watch(model) as seen, torch.no_grad():
            model(x)
        layers = {path: one for path, one in seen.layers.items() if path != "whole" or step or not rank}
        rows.append(int(unite(layers, {}, ranks, step=step)[0]["whole"].rows_seen[0]))
        with torch.no_grad():
            model.module.whole.q.weight *= 1.5
    return rows


@pytest.mark.long
@pytest.mark.slow
def test_ranks_may_first_see_a_layer_at_different_steps(tmp_path):
    assert run_ranks(tmp_path, 2, see_a_layer_late) == [[32, 64], [32, 64]]


def refuse(rank, world):
    says = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("lattice",))
    own = HeadSummary.of(rows_of(0, 0, 0, 3, 2))
    model, x, _ = spread("by hand")
    with watch(model) as seen, torch.no_grad():
        model(x)
    for ask in (
        lambda: all_reduce(own, mesh=mesh),
        lambda: all_reduce(own, mesh="tp"),
        lambda: unite(seen.layers, {}, Ranks.of(model=model)),
        lambda: unite({}, {}, Ranks.of(), step=rank),
        lambda: unite(
            {"a": own} if rank else {}, {}, Ranks.of(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        ),
    ):
        with pytest.raises(SqrtdkError) as caught:
            ask()
        says.append(str(caught.value))
    return says


@pytest.mark.long
@pytest.mark.slow
def test_what_cannot_be_told_is_refused_on_every_rank_with_the_reason(tmp_path):
    first, second = run_ranks(tmp_path, 2, refuse)
    assert first == second
    name, kind, parameters, steps, shards = first
    assert "mesh must have dimensions with names that are known" in name
    assert "other heads: tp, " in name
    assert name.endswith("got 'lattice'")
    assert kind == "mesh must be a DeviceMesh, got str"
    assert parameters.startswith(
        "mesh must be given: the ranks hold different parameters of split, so that their heads"
    )
    assert steps == "every rank's monitor must observe the same step, got [0, 1] by rank"
    assert shards == "every shard of the heads must see a, got none by [0]"


def ask_for_the_group_of_a_mesh(rank, world):
    """Return how many groups were made for two of three processes."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("dp", "tp"))
    if rank == 2:
        return 0
    made, new_group = [], torch.distributed.new_group
    torch.distributed.new_group = lambda *args, **options: made.append(args) or new_group(*args, **options)
    groups = {id(Ranks.of(None, mesh).group) for _ in range(3)}
    return len(made), len(groups)


@pytest.mark.long
def test_a_mesh_of_some_processes_has_one_group(tmp_path):
    assert run_ranks(tmp_path, 3, ask_for_the_group_of_a_mesh) == [(1, 1), (1, 1), 0]
