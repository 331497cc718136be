"""Runs whole layers on a stand-in GPU; `test_layer_launches.py` runs this and reads its output.

python tests/aot/layer_child.py ARCH     (TRITON_INTERPRET unset; prints one JSON object)

Kernels are compiled and launched, but compute nothing, so the ops that build tables give what their
references give, and everything else is left as it was allocated.
"""

import contextlib
import itertools
import json
import pkgutil
import sys
from importlib import import_module

import torch
from moe_world import World
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import relibra
import relibra_kernels
from relibra.layer_options import ACTIVATIONS, LayerOptions
from relibra_kernels.ops import backend, routing
from relibra_kernels.ops import warmup as warm
from relibra_kernels.testing.stub_gpu import use_stub_gpu
from relibra_kernels.triton_ops import configs

HIDDEN, EXPERT, TOP_K = 128, 192, 4
WORLD = World(
    num_layers=2, micro_batches=6, num_experts=8, top_k=TOP_K, hidden=HIDDEN, expert=EXPERT
)
TOKENS = (0, 1, 15, 16, 17, 100)
OPTIONS = {
    "plain": {},
    "bias": {"bias": True, "activation": "clamped_swiglu", "interleaved": True},
    "transposed": {"activation": "gelu", "transposed": True, "score_at": "activation"},
    "less memory": {"save": "redispatch", "recompute_h": True},
}
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


class SyncError(Exception):
    """Something that waits for the device."""


class NoSync(TorchDispatchMode):
    """Refuses what would wait for a device if the tensors lay on one.

    Args:
        host: tensors that are on the host by contract.
    """

    def __init__(self, host):
        super().__init__()
        self._host = {x.untyped_storage().data_ptr() for x in host if x.numel()}
        self.on, self.reads = True, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = [x for x in args[1:2] if isinstance(x, list | tuple) and name.startswith("index")]
        masked = any(x is not None and x.dtype == torch.bool for mask in masks for x in mask)
        if self.on and (masked or name in WAITING):
            raise SyncError(name)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def off(self):
        self.on = False
        yield
        self.on = True

    def refused(self, name, original):
        def method(*args, **kwargs):
            if self.on and not (name == "numpy" and self._is_host(args[0])):
                raise SyncError(name)
            return original(*args, **kwargs)

        return method

    def _is_host(self, tensor):
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._host

    @contextlib.contextmanager
    def patched(self):
        """Python methods too: those of CPU tensors do not pass the dispatcher."""
        saved = [(torch.Tensor, name) for name in (*READS, "numpy")]
        saved += [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize")]
        saved += [(torch.cuda.Event, "synchronize")]
        originals = [getattr(owner, name) for owner, name in saved]
        for (owner, name), original in zip(saved, originals, strict=True):
            setattr(owner, name, self.refused(name, original))
        try:
            with self:
                yield
        finally:
            for (owner, name), original in zip(saved, originals, strict=True):
                setattr(owner, name, original)


class Emulation:
    """Makes ops take CPU tensors for those of a GPU."""

    def __init__(self):
        self.guard = None
        for found in pkgutil.iter_modules(import_module("relibra_kernels.ops").__path__):
            module = import_module(f"relibra_kernels.ops.{found.name}")
            for name, value in (("use_triton", True), ("checks_values", False)):
                if hasattr(module, name):
                    setattr(module, name, lambda *args, value=value: value)
        import_module("relibra.use").checks_values = lambda tensor: False
        routing.with_error_word = self.with_error_word

    def with_error_word(self, kernel, reference, *arguments):
        kernel(*arguments, backend.error_word(arguments[0]))
        with self.guard.off() if self.guard else contextlib.nullcontext():
            return backend.on_cpu(reference, *arguments)


def split(options):
    """Options of the module and of the layer."""
    own = {name: options[name] for name in ("bias", "dtype") if name in options}
    rest = {name: value for name, value in options.items() if name not in own}
    return {"dtype": torch.bfloat16, **own}, LayerOptions(**rest)


def spec_of(options, **changes):
    own, layer = split(options)
    return warm.LayerSpec(
        HIDDEN,
        EXPERT,
        TOP_K,
        num_home=WORLD.num_experts,
        dtype=own["dtype"],
        bias=own.get("bias", False),
        activation=ACTIVATIONS[layer.activation],
        interleaved=layer.interleaved,
        transposed=layer.transposed,
        score_at=layer.score_at,
        **changes,
    )


def prepared(options, block, combine="reduced", grad_mode="returned"):
    """A runtime with a model of such layers."""
    own, layer = split(options)
    model = torch.nn.ModuleList(
        relibra.BalancedMoE(WORLD.num_experts, HIDDEN, EXPERT, layer=i, options=layer, **own)
        for i in WORLD.shape.moe_layers
    )
    sizes = {"block_rows": block, "kernels": "triton"}
    runtime = relibra.Runtime(None, WORLD.topology, combine=combine, grad_mode=grad_mode, **sizes)
    if grad_mode == "main_grad":
        for param in model.parameters():
            param.main_grad = torch.zeros(param.shape)
    runtime.attach(model)
    return runtime, model


def run_step(options, block, guard_of=contextlib.nullcontext, **modes):
    """A step of planned micro-batches of 0 to 100 tokens; weight fields that each layer made."""
    runtime, model = prepared(options, block, **modes)
    ids = [WORLD.ids(0, m)[:1].repeat(n, 0) for m, n in enumerate(TOKENS)]
    routes = [relibra.DispatchRows(one, num_experts=WORLD.num_experts) for one in ids]
    plan = WORLD.random_plan(relibra.LoadMatrix.stack([relibra.LoadMatrix.from_rows(routes)]))
    with runtime.step(plan, {"train": routes}) as step, guard_of(step):
        for m, num_tokens in enumerate(TOKENS):
            x = torch.zeros(num_tokens, HIDDEN, dtype=model[0].w13.dtype, requires_grad=True)
            scores = torch.zeros(num_tokens, TOP_K, requires_grad=True)
            with step.forward(micro_batch=m):
                y = x
                for one in model:
                    y = one(y, scores)
            y.sum().backward()  # a gradient of stride 0
    made = [cache.num_made for cache in runtime.table_memory._layers.values()]
    runtime.close()
    return made


def unaligned(x):
    """The same integers, off any boundary."""
    flat = torch.empty(x.numel() + 1, dtype=torch.int32)
    return flat[1:].view(x.shape).copy_(x)


def run_ops(spec, block):
    """The warm-up's own ops on other numbers of tokens and unaligned tables."""
    original = warm.TOKENS
    for num_tokens in (1, 15, 16, 17, 1000):
        warm.TOKENS = num_tokens
        layer = warm._Layer(spec, torch.device("cpu"), "triton", block)
        layer._int = unaligned
        layer.tiles = unaligned(layer.tiles)
        for _ in layer.run():
            pass
    warm.TOKENS = original


def compiles(launches, block, names):
    """Options -> (variants of a warm-up, those that a step adds, those of other ops' numbers).

    And options -> weight fields that each layer made in a step, by mode of the gradients.
    """
    found, fields = {}, {}
    for name in names:
        options = OPTIONS[name]
        counts, spec = [], spec_of(options, num_ranks=8)

        def count(counts=counts):
            counts.append(len({one.variant for one in launches}))

        count()
        runtime, model = prepared(options, block)
        (report,) = runtime.warmup(TOP_K)  # one kind of layer
        assert report.num_ops > 15, report
        relibra_kernels.warmup(spec, device="cpu", backend="triton", block_rows=block)
        count()
        made = [run_step(options, block)]
        made += [run_step(options, block, combine="exact", grad_mode="main_grad")]
        count()
        run_ops(spec, block)
        count()
        found[name] = [b - a for a, b in zip(counts, counts[1:], strict=False)]
        fields[name] = made
    return found, fields


def host_tensors(step):
    for source in step._sources.values():
        yield from source.quota.tensors()
        yield from (source.slot_rows_n, source.push_list, source.pull_list)


def syncs(emulation, block):
    """Events of planned steps that would wait for a device; none, or an error that says which."""
    names = set()

    @contextlib.contextmanager
    def guarded(step):
        emulation.guard = NoSync(host_tensors(step))
        with profile(activities=[ProfilerActivity.CPU]) as trace, emulation.guard.patched():
            yield
        emulation.guard = None
        names.update(event.name for event in trace.events())

    for options, combine in zip(OPTIONS.values(), itertools.cycle(("reduced", "exact"))):
        run_step(options, block, guarded, combine=combine)
    assert any("relibra::expert_wgrad" in name for name in names)
    waiting = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
    return sorted(name for name in names if name in waiting)


def refused():
    """What the guard refuses, so that a run without an error means something."""
    x, host, found = torch.ones(2), torch.ones(2), []
    reads = {
        "item": lambda: x.sum().item(),
        "tolist": lambda: x.tolist(),
        "bool": lambda: bool(x.any()),
        "int": lambda: int(x[0]),
        "index": lambda: [1, 2][torch.ones((), dtype=torch.int64)],
        "cpu": lambda: x.cpu(),
        "numpy": lambda: x.numpy(),
        "nonzero": lambda: x.nonzero(),
        "torch.nonzero": lambda: torch.nonzero(x),
        "mask": lambda: x[x > 0],
        "synchronize": lambda: torch.cuda.synchronize(),  # looked up when it is called
    }
    guard = NoSync([host])
    with guard.patched():
        host.numpy()
        for name, read in reads.items():
            try:
                read()
            except SyncError:
                found.append(name)
    return found, list(reads)


def main():
    torch.set_num_threads(1)
    arch = sys.argv[1]
    launches, emulation = use_stub_gpu(arch), Emulation()
    block = configs.block_rows(arch)
    everything = arch == "sm_90"
    names = list(OPTIONS) if everything else ["plain"]
    found = dict(zip(("compiles", "fields"), compiles(launches, block, names), strict=True))
    if everything:
        found["refused"] = refused()
        found["syncs"] = syncs(emulation, block)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
