"""Times of an optimizer step with dense weights in each format and place, taking turns in one process.

    python tests/scripts/cuda_dense.py [--shape E,k,H,I] [--layers 2] [--tokens 2048] [--micro-batches 8]
        [--training 50] ...

The model is that of `ktft bench step`; its linear layers are packed here, so that experts, LoRA and tokens are the same
in all cases. First the losses and gradients of the packed layers are compared with those of ordinary layers with the
decoded weights: losses must be equal, recorded or not. Kernels that add in an order of their own may change gradients
by themselves, so the ordinary layers' gradients are compared with each other as well.

`--training` then trains for so many steps from one state, with packed layers and with ordinary ones of the decoded
weights. Exits 1 if a step's losses are more than 0.2% apart. Beside them stand the losses of the bf16 weights, which
show what the rounding of the format does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from benchmarks.step.cases import ORDERS, Job, Times, parse_step_shape
from benchmarks.step.runners import Ktft
from ktft import native
from ktft.checkpoint.encoded import Encoded
from ktft.dense.formats import PLAIN
from ktft.dense.linear import PackedLinear
from ktft.dense.stream import DenseStream
from ktft.model.layer_order import decoder_layers
from ktft.model.recorder import LayerRecorder
from ktft.native.dense import pack_dense

Layers = dict[str, nn.Linear]
Gradients = dict[str, Tensor]
MOST = 2e-3  # of a loss
SEEN_BATCHES = 4  # that take turns, so that their losses fall
TRAINING_RATE = 1e-4  # a loss near 0 would show the order of sums


def base_layers(model: nn.Module) -> Layers:
    """The frozen linear layers within the adapted ones of decoder layers, by the adapted ones' names."""
    return {
        name: module.base_layer
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Linear) and ".layers." in name
    }


def packed_layers(plain: Layers, format: str, on_host: bool) -> Layers:
    """The same layers, packed."""
    made: dict[str, PackedLinear] = {}
    by_layer: dict[str, list[PackedLinear]] = {}
    for name, linear in plain.items():
        like = nn.Linear(linear.in_features, linear.out_features, False, device="meta", dtype=linear.weight.dtype)
        module = made[name] = PackedLinear(like, format)
        weight = linear.weight.detach().cpu()
        values = weight.contiguous().view(torch.uint8).flatten()
        if module.format != PLAIN:
            values = pack_dense(native.runtime(), module.format, **Encoded(weight).load_arguments())
        module.host = values
        by_layer.setdefault(name.partition(".layers.")[2].partition(".")[0], []).append(module)
    device = next(iter(plain.values())).weight.device
    if not on_host:
        for module in made.values():
            module.weight = nn.Parameter(module.take_host().to(device), requires_grad=False)
        return dict(made)
    stream = DenseStream([[module.take_host() for module in layer] for layer in by_layer.values()])
    for place, module in enumerate(each for layer in by_layer.values() for each in layer):
        module.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=device), requires_grad=False)
        module.read_from(stream, place)
    return dict(made)


def new_recorder(runner: Ktft, record: bool = True) -> LayerRecorder:
    return LayerRecorder(list(decoder_layers(runner.model).values()), runner.order.lockstep, record)


def use(runner: Ktft, layers: Layers, recorder: LayerRecorder | None = None) -> None:
    """Make the model compute with these layers. Recordings are of the layers that they were made with."""
    for name, linear in layers.items():
        runner.model.get_submodule(name).base_layer = linear
    runner.order.recorder = recorder or new_recorder(runner, False)
    runner.by_layer = runner.order.recorder.on


def losses(runner: Ktft, tokens: int, steps: int) -> tuple[list[float], Gradients]:
    """Of steps without an update, on the same tokens; and the last one's gradients."""
    found, gradients = [], {}
    for _ in range(steps):
        torch.manual_seed(7)
        batches = [torch.randint(1000, (1, tokens), device=runner.device) for _ in range(runner.job.micro_batches)]
        runner.order.recorder.begin()
        found.append(float(runner.accumulate(batches)))
        named = runner.model.named_parameters()
        gradients = {name: p.grad.detach().float().cpu() for name, p in named if p.grad is not None}
        runner.optimizer.zero_grad()
        if runner.lanes is not None:
            runner.lanes.end_step()
    return found, gradients


def difference(one: Gradients, other: Gradients) -> float:
    """The largest difference of a gradient, relative to its norm."""
    assert one.keys() == other.keys() and one
    return max(float((a - other[name]).norm() / a.norm().clamp_min(1e-30)) for name, a in one.items())


def trained(runner: Ktft, start: list[Tensor], steps: int) -> list[float]:
    """Losses of steps from this state of what is trained."""
    parameters = [each for each in runner.model.parameters() if each.requires_grad]
    with torch.no_grad():
        for each, value in zip(parameters, start, strict=True):
            each.copy_(value)
    if runner.lanes is not None:
        runner.lanes.forget()
    runner.optimizer = runner.make_optimizer(parameters)
    for group in runner.optimizer.param_groups:
        group["lr"] = TRAINING_RATE
    found = []
    for step in range(steps):
        torch.manual_seed(step % SEEN_BATCHES)
        batches = [
            torch.randint(1000, (1, runner.job.tokens[0]), device=runner.device)
            for _ in range(runner.job.micro_batches)
        ]
        runner.order.recorder.begin()
        found.append(float(runner.accumulate(batches)))
        runner.update()
    return found


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference of two losses of a step, relative to the second's."""
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


def compare_trainings(runner: Ktft, cases: dict[str, Layers], plain: Layers, steps: int) -> bool:
    """Print losses of trainings with each case's layers. Returns whether they are those of the decoded weights."""
    start = [each.detach().clone() for each in runner.model.parameters() if each.requires_grad]
    use(runner, plain)
    unrounded = trained(runner, start, steps)
    same = True
    for name, layers in cases.items():
        use(runner, decoded(layers))
        expected = trained(runner, start, steps)
        use(runner, layers, new_recorder(runner))
        found = trained(runner, start, steps)
        same = same and apart(found, expected) <= MOST
        print(
            f"{name:10} {steps} steps, loss {found[0]:.4f} to {found[-1]:.4f}, at most {apart(found, expected):.2e} "
            f"from the decoded weights' loss of the same step, {apart(found, unrounded):.2e} from that of bf16 weights",
            flush=True,
        )
    return same


def decoded(layers: Layers) -> Layers:
    return {name: each.to_linear() if isinstance(each, PackedLinear) else each for name, each in layers.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="256,8,7168,2048", help="a name, or E,k,H,I [%(default)s]")
    parser.add_argument("--cases", default="bf16,fp8,int8,k4,bf16@host,fp8@host,k4@host")
    for name, value in (
        ("layers", 2),
        ("tokens", 2048),
        ("micro-batches", 8),
        ("runs", 5),
        ("warm", 3),
        ("training", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    job = Job(
        "ktft", parse_step_shape(args.shape), args.layers, (args.tokens,), "uniform", 8, True, "k4", "stream",
        micro_batches=args.micro_batches, order=ORDERS[0],
    )  # fmt: skip
    runner = Ktft(job)
    plain = base_layers(runner.model)
    cases: dict[str, Layers] = {}
    for name in args.cases.split(","):
        format, _, place = name.partition("@")
        cases[name] = plain if name == "bf16" else packed_layers(plain, format, place == "host")
    size: Tensor = torch.tensor(sum(each.weight.nbytes for each in plain.values()))
    print(f"{len(plain)} linear layers, {float(size) / 1e9:.2f} GB in bf16", flush=True)
    for _ in range(2):  # without a step, LoRA's A matrices have gradients of zero
        runner.step(args.tokens)
    recorders = {name: new_recorder(runner) for name in cases}
    for name, layers in cases.items():
        use(runner, decoded(layers))
        expected, reference = losses(runner, args.tokens, 1)
        itself = difference(reference, losses(runner, args.tokens, 1)[1])
        use(runner, layers, recorders[name])
        found, gradients = losses(runner, args.tokens, 4)
        off = max(abs(each / expected[0] - 1) for each in found)
        print(
            f"{name:10} loss {found[-1]:.6f}, off by {off:.2e} from that of the decoded weights, "
            f"gradients by at most {difference(reference, gradients):.2e} (theirs by {itself:.2e} when repeated)",
            flush=True,
        )
    times: dict[str, list[Times]] = {name: [] for name in cases}
    for run in range(args.warm + args.runs):
        for name, layers in cases.items():
            use(runner, layers, recorders[name])
            runner.step(args.tokens)
            step = runner.step(args.tokens)
            if run >= args.warm:
                times[name].append(step)
    base = [each.step for each in times["bf16"]] if "bf16" in times else []
    for name, steps in times.items():
        middle = statistics.median(each.step for each in steps)
        ratio = statistics.median(each.step / b for each, b in zip(steps, base, strict=True)) if base else 1.0
        print(f"{name:10} step {1e3 * middle:9.2f} ms, {ratio:.3f} of bf16's", flush=True)
    return not (args.training == 0 or compare_trainings(runner, cases, plain, args.training))


if __name__ == "__main__":
    sys.exit(main())
