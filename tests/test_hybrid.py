"""CPU experts in stream order: the native layer's bits, on the CPU and through a driver that needs no GPU."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path

import pytest
import torch
from contract import EXPERTS, TOP_K, inputs_for, make_layer, make_lora
from dying import forked
from fake_cuda import Fake
from host_experts import (
    HIDDEN,
    INTERMEDIATE,
    TOKENS,
    WAYS,
    Make,
    begin_in_place,
    direct,
    driver,
    give,
    host,
    inputs,
    layer_of,
    make,
    same,
    served,
    through,
)

from ktft import native
from ktft.native import ELSEWHERE, ExpertLayer, HostExperts, HostExpertsError
from ktft.native.cuda import CudaError, Driver

__all__ = ["driver", "host", "make"]


@pytest.mark.parametrize("fmt", ["bf16", "int8", "k4"])
def test_the_layers_own_bits(host: HostExperts, fmt: str) -> None:
    layer = layer_of(fmt)
    lora = make_lora(HIDDEN, INTERMEDIATE, 8, torch.float32)
    for tokens, adapters in [(1, None), (3, lora), (TOKENS, lora), (2, None), (0, None)]:
        give(host, layer, adapters)
        x, index, weights = inputs(tokens, seed=tokens)
        index[:, 0][::2] = ELSEWHERE
        for dtype in (torch.int64, torch.int32):
            out = through(host, layer, x, index.to(dtype), weights, same(tokens))
            assert torch.equal(out, served(layer, x, index, weights, adapters))
    x, index, weights = inputs(4)
    assert not through(host, layer, x, torch.full_like(index, ELSEWHERE), weights).any()
    host.check()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_in_place_of_copies(host: HostExperts, dtype: torch.dtype) -> None:
    layer = layer_of()
    for tokens in (1, TOKENS, 3):
        x, index, weights = inputs(tokens, seed=tokens)
        out = begin_in_place(host, layer, x, index.to(dtype), weights)
        host.wait_in_place(layer, tokens, stream=5)
        assert torch.equal(out, direct(layer, x, index, weights))
    assert torch.equal(through(host, layer, x, index, weights), out)
    for count in (0, TOKENS + 1):
        with pytest.raises(ValueError, match=rf"{count} tokens, host experts take 1 to {TOKENS}"):
            host.place(layer, *inputs(count))
    host.check()


@pytest.mark.parametrize("way", WAYS)
def test_in_place_nothing_is_copied_and_no_job_is_overtaken(fake: Fake, make: Make, way: str) -> None:
    layer, given = layer_of(), inputs(3)
    host = make(layer, way)
    fake.reset()
    for begun_before in (False, True):
        begin_in_place(host, layer, *given)  # an error would skip the wait
        enqueued = [
            call.replace("word 1", "host").replace("until 0", "host") for call in fake.calls if "stream" in call
        ]
        assert enqueued == ["host stream 5"] * (2 if begun_before else 1)
        fake.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(make: Make, dtype: torch.dtype) -> None:
    layer = layer_of()
    x, index, weights = inputs(3)
    found = through(make(layer, dtype=dtype), layer, x.to(dtype), index, weights)
    assert torch.equal(found, direct(layer, x.to(dtype), index, weights))


def test_slots_overlap(host: HostExperts) -> None:
    """One job may be waited for after the next was submitted, as deferred experts are."""
    first, second = layer_of("k4"), layer_of("int8")
    a, b = inputs(3, seed=1), inputs(5, seed=2)
    host.submit(first, *a, slot=1)
    host.submit(second, *b, slot=0)
    late = host.wait(second, 5, slot=0)
    assert torch.equal(host.wait(first, 3, slot=1), direct(first, *a)) and torch.equal(late, direct(second, *b))


@pytest.mark.parametrize("way", WAYS)
def test_a_captured_graph_sees_new_inputs_adapters_and_errors(fake: Fake, make: Make, way: str) -> None:
    layers = [layer_of("k4"), layer_of("int8")]
    host = make(layers[0], way)
    x, index, weights = inputs(4)
    of_token = same(4)
    with fake.capture():
        outs = [through(host, layer, x, index, weights, of_token) for layer in layers]
    eager = through(host, layers[0], *inputs(4, seed=9))  # between capture and replay, and of the same size
    assert torch.equal(eager, direct(layers[0], *inputs(4, seed=9)))
    lora = make_lora(HIDDEN, INTERMEDIATE, 4, torch.bfloat16)
    for seed, adapters in enumerate([None, lora, None]):
        for tensor, value in zip((x, index, weights), inputs(4, seed), strict=True):
            tensor.copy_(value)
        give(host, layers[1], adapters)
        gc.collect()
        fake.replay()
        host.check()
        assert torch.equal(outs[0], direct(layers[0], x, index, weights))
        assert torch.equal(outs[1], served(layers[1], x, index, weights, adapters))
    index[2, 1] = EXPERTS
    fake.replay()
    for _ in range(2):
        with pytest.raises(HostExpertsError, match=rf"layers\.7\.k4: .*expert {EXPERTS}, but the layer's experts are"):
            host.check()
    assert not outs[0].any() and not outs[1].any()  # the second layer's job was skipped


def test_nan_is_an_error_with_the_layers_name_once(host: HostExperts) -> None:
    layer = layer_of("int8")
    x, index, weights = inputs(3)
    x[1, 5] = float("nan")
    assert not through(host, layer, x, index, weights).any()
    with pytest.raises(HostExpertsError, match=r"^layers\.7\.int8: hidden states hold NaN or Inf \(token 1 of 3\)"):
        host.check()
    assert not through(host, layer, *inputs(2)).any()  # nothing is computed any more


def test_heat_and_time_are_counted(host: HostExperts) -> None:
    layer = layer_of()
    total = torch.zeros(EXPERTS, dtype=torch.int64)
    assert torch.equal(host.counts(layer), total) and host.seconds(layer) == 0
    for tokens in (1, 5, 8):
        x, index, weights = inputs(tokens, seed=tokens)
        index[0, 0] = ELSEWHERE
        through(host, layer, x, index, weights)
        total += torch.bincount(index[index != ELSEWHERE], minlength=EXPERTS)
    assert torch.equal(host.counts(layer), total)
    before = host.seconds(layer)
    through(host, layer, *inputs(8))
    assert 0 < before < host.seconds(layer) < 10


@pytest.mark.parametrize("words", [True, False])
def test_what_is_enqueued(fake: Fake, driver: Driver, make: Make, words: bool) -> None:
    """Words, or host functions where the driver has no words."""
    fake.reset(words=words)
    layer, (x, index, weights) = layer_of(), inputs(3)
    host = make(layer, driver=driver)
    assert host.through == ("words" if words else "host_functions")
    fake.reset()
    for block in (1, 1, 2):
        through(host, layer, x, index.int() if block == 1 else index, weights)
        assert [call for call in fake.calls if "stream" in call] == [
            f"out {3 * HIDDEN * 2} stream 5",
            f"out {3 * TOP_K * (4 if block == 1 else 8)} stream 5",
            f"out {3 * TOP_K * 4} stream 5",
            f"word {block} stream 5" if words else "host stream 5",
            "until 0 stream 5" if words else "host stream 5",
            f"in {3 * HIDDEN * 2} stream 5",
        ]
        fake.reset()
    host.close()
    host.close()
    assert len([call for call in fake.calls if call.startswith("unregister")]) == 1


def test_words_the_driver_has_not_are_refused(fake: Fake, driver: Driver, make: Make) -> None:
    fake.reset(words=False)
    with pytest.raises(ValueError, match="cannot read and write words of host memory: use host_functions"):
        make(layer_of(), driver=driver, through="words")
    assert fake.calls[-1].startswith("unregister")


@pytest.mark.parametrize(
    ("way", "after", "call"),
    [(WAYS[0], 0, "cuMemcpyDtoHAsync"), (WAYS[0], 3, "cuStreamWriteValue32"), (WAYS[1], 3, "cuLaunchHostFunc")],
)
def test_what_the_driver_refuses_is_an_error(fake: Fake, make: Make, way: str, after: int, call: str) -> None:
    layer, (x, index, weights) = layer_of(), inputs(3)
    host = make(layer, way)
    through(host, layer, x, index, weights)  # the thread has its context
    fake.reset(fail_after=after, failure=999)
    with pytest.raises(CudaError, match=f"{call}.* failed: error 999"):
        host.submit(layer, x, index, weights)
    fake.reset()
    assert torch.equal(through(host, layer, x, index, weights), direct(layer, x, index, weights))
    fake.reset(fail_after=0, failure=712)
    with pytest.raises(CudaError, match=r"cuMemHostRegister of \d+ bytes at"):
        make(layer, way)
    fake.reset()


def test_memory_is_unlocked_when_it_has_no_address_on_the_device(fake: Fake, make: Make) -> None:
    layer = layer_of()
    make(layer, "words").close()  # the thread has its context
    fake.reset(fail_after=1, failure=999)
    with pytest.raises(CudaError, match="cuMemHostGetDevicePointer failed"):
        make(layer, "words")
    assert [call.split()[0] for call in fake.calls] == ["register", "address", "unregister"]
    assert fake.calls[0].split()[1] == fake.calls[2].split()[1]


def big_job(tokens: int = TOKENS) -> tuple[ExpertLayer, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """It takes far longer than it takes to submit the next."""
    x, index, weights = inputs_for((tokens, tokens), 512)
    call = x.detach()[:tokens], index[:tokens], weights.detach()[:tokens]
    return make_layer(512, 768, "bf16", native.default_isa(), 1), call


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_was_not_waited_for_is_done_before_the_next(make: Make, way: str) -> None:
    """What came between submit and wait may fail: the slot can be used again, and its next output is right."""
    layer, (x, index, weights) = big_job()
    host = make(layer, way, hidden_size=512)
    for _ in range(3):
        host.submit(layer, x, index, weights)
    assert torch.equal(through(host, layer, -x, index, weights), direct(layer, -x, index, weights))
    host.check()


def test_a_slot_in_use_is_an_error(fake: Fake, make: Make) -> None:
    """Replays of a graph on streams that nothing orders would overwrite what is being computed."""
    tokens = 1024  # tens of milliseconds of one thread: a replay that is held up still comes before the job's end
    layer, call = big_job(tokens)
    host = make(layer, "host_functions", hidden_size=512, max_tokens=tokens)
    with fake.capture():
        host.submit(layer, *call)
    for _ in range(20):
        fake.replay()
    host.wait(layer, tokens)
    with pytest.raises(HostExpertsError, match="its slot was submitted to while the job before was not done"):
        host.check()


@pytest.mark.parametrize("way", WAYS)
def test_an_idle_thread_sleeps_and_still_answers(make: Make, way: str) -> None:
    layer, call = layer_of(threads=1), inputs(3)
    host = make(layer, way)
    expected = direct(layer, *call)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    assert torch.equal(through(host, layer, *call), expected)


BAD = [
    ({"x": torch.zeros(3, HIDDEN)}, r"hidden_states must be contiguous \[3, 64\] torch.bfloat16 on cpu, got \[3, 64\]"),
    ({"x": torch.zeros(3, 32).bfloat16()}, r"got \[3, 32\] torch.bfloat16"),
    ({"x": torch.zeros(HIDDEN, 3).bfloat16().T}, "hidden_states must be contiguous"),
    ({"index": torch.zeros(2, TOP_K, dtype=torch.int64)}, r"top_k_index must be contiguous \[3, 2\]"),
    ({"index": torch.zeros(3, TOP_K)}, r"torch.int32 or torch.int64 on cpu, got \[3, 2\] torch.float32"),
    ({"weights": torch.zeros(3, TOP_K).half()}, "top_k_weights must be contiguous"),
    ({"x": torch.zeros(33, HIDDEN).bfloat16(), "index": torch.zeros(33, TOP_K, dtype=torch.int64),
      "weights": torch.zeros(33, TOP_K)}, "33 tokens, host experts take 1 to max_tokens = 32"),
    ({"slot": 2}, "there is no slot 2, host experts have 2"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_calls(host: HostExperts, change: dict, message: str) -> None:
    layer, (x, index, weights) = layer_of(), inputs(3)
    args = {"x": x, "index": index, "weights": weights, "slot": 0} | change
    with pytest.raises(ValueError, match=message):
        host.submit(layer, args["x"], args["index"], args["weights"], slot=args["slot"])


def test_bad_waits_and_layers(host: HostExperts) -> None:
    layer, other = layer_of(), layer_of("int8")
    with pytest.raises(ValueError, match="3 tokens of it are not what was last submitted to slot 0"):
        host.wait(layer, 3)
    host.submit(layer, *inputs(3))
    for bad in ((layer, 2), (other, 3)):
        with pytest.raises(ValueError, match="so there is nothing to wait for"):
            host.wait(*bad)
    host.wait(layer, 3)
    with pytest.raises(ValueError, match="its runtime is another"):
        host.submit(layer_of(threads=1), *inputs(3))
    wide = make_layer(96, 96, "int8", native.default_isa(), 2)
    with pytest.raises(ValueError, match="hidden_size is 96, host experts were made for 64"):
        host.counts(wide)
    host.close()
    with pytest.raises(ValueError, match="host experts are closed"):
        host.submit(layer, *inputs(3))


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"slots": 0}, {"top_k": -1}, {"dtype": torch.int8}])
def test_bad_sizes(make: Make, change: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        make(layer_of(), **change)


def test_steady_calls_take_no_memory(make: Make) -> None:
    layer = layer_of(threads=1)
    host = make(layer)
    give(host, layer, make_lora(HIDDEN, INTERMEDIATE, 8, torch.float32))
    call = (*inputs(8), same(8))
    for _ in range(5):
        through(host, layer, *call)
    before, faults = layer.runtime.workspace_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    calls = 100
    for _ in range(calls):
        through(host, layer, *call)
    assert layer.runtime.workspace_bytes == before
    # Anything as large as a call's workspace would fault dozens of times; sanitizers keep freed memory for a while
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 2 * calls


def test_a_forked_child_is_refused(host: HostExperts, tmp_path: Path) -> None:
    layer, call = layer_of(), inputs(3)
    through(host, layer, *call)

    def child() -> None:
        with pytest.raises(ValueError, match="belong to the process this one was forked from"):
            host.submit(layer, *call)
        host.close()

    assert forked(child, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert torch.equal(through(host, layer, *call), direct(layer, *call))
