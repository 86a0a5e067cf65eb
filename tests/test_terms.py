"""Tables with a row for each place where experts run, or for each resource that places use, have all the rows."""

from __future__ import annotations

from dataclasses import fields

from ktft.config import PLACEMENTS
from ktft.lanes.decide.costs import Costs
from ktft.lanes.decide.placer import Placement
from ktft.lanes.terms import Lane, Mode, Where
from ktft.plan.plan import LANE_WORDS
from ktft.spans import KINDS, PARALLEL


def test_every_place_has_its_rows() -> None:
    places = [str(where) for where in Where]
    assert {field.name for field in fields(Placement)} >= set(places)
    assert set(places) <= set(KINDS) and set(places) <= set(PARALLEL), "a row of ktft.spans.KINDS draws it"
    assert PLACEMENTS == ("auto", *places) == tuple(Mode), "kt_config.placement can force it"


def test_every_resource_has_its_rows() -> None:
    assert list(Costs._fields) == [str(lane) for lane in Lane]
    assert set(LANE_WORDS) == set(Lane)
