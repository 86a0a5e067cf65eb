"""Triton kernels launched the short way: compiled once for each kind of arguments, never launched with others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ktft.lanes.ops import triton_launch
from ktft.lanes.ops.triton_launch import short


@dataclass
class Param:
    name: str
    is_constexpr: bool = False
    do_not_specialize: bool = False


@dataclass
class JITFunction:
    """In place of Triton's: notes what it compiles and what the compiled kernels are launched with."""

    compiled: list[tuple[Any, ...]] = field(default_factory=list)
    launched: list[tuple[Any, ...]] = field(default_factory=list)
    params: tuple[Param, ...] = (
        Param("x"),
        Param("cols"),
        Param("rows", do_not_specialize=True),
        Param("scale"),
        Param("A", is_constexpr=True),
        Param("B", is_constexpr=True),
    )

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **constants: Any) -> Any:
            self.compiled.append((grid, args, constants))
            return Compiled(self)

        return compile


@dataclass
class Compiled:
    function: JITFunction

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert len(grid) == 3
        return lambda *args: self.function.launched.append((grid, *args))


X = torch.zeros(64)


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_version", lambda: (3, 6))


def test_what_was_compiled_is_launched_with_its_constants_in_order() -> None:
    function = JITFunction()
    kernel = short(function)
    for rows in (5, 16, 1):  # not specialized: one kernel for all
        kernel[(rows, 2)](X, 48, rows, None, B=2, A=1)
    assert function.compiled == [((5, 2), (X, 48, 5, None), {"A": 1, "B": 2})]
    assert function.launched == [((16, 2, 1), X, 48, 16, None, 1, 2), ((1, 2, 1), X, 48, 1, None, 1, 2)]


@pytest.mark.parametrize(
    "args, constants",
    [
        ((X.double(), 48, 5, None), (1, 2)),
        ((X[1:], 48, 5, None), (1, 2)),  # its address is no multiple of 16
        ((X, 49, 5, None), (1, 2)),
        ((X, 1, 5, None), (1, 2)),
        ((X, 48, 1 << 40, None), (1, 2)),  # 64 bits
        ((X, 48, 5, X), (1, 2)),
        ((X, 48, 5, 0.5), (1, 2)),
        ((X, 48, 5, None), (True, 3)),
    ],
)
def test_other_arguments_are_compiled_for(args: tuple[Any, ...], constants: tuple[int, int]) -> None:
    function = JITFunction()
    kernel = short(function)
    kernel[(1,)](X, 48, 5, None, A=1, B=2)
    for _ in range(2):
        kernel[(1,)](*args, A=constants[0], B=constants[1])
    assert len(function.compiled) == 2 and len(function.launched) == 1


def test_numbers_with_fractions_are_of_one_kind() -> None:
    function = JITFunction()
    kernel = short(function)
    for scale in (0.5, 1.0, 2.0):
        kernel[(1,)](X, 48, 5, scale, A=1, B=2)
    assert len(function.compiled) == 1 and [args[4] for args in function.launched] == [1.0, 2.0]


@pytest.mark.parametrize("found", [(3, 2), (3, 8), (0, 0)])
def test_other_versions_of_triton_launch_their_own_way(found: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_version", lambda: found)
    function = JITFunction()
    assert short(function) is function


def test_what_triton_interprets_is_left_alone() -> None:
    assert short(len) is len
