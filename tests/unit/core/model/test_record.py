from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest

from distlaunch.core.model import record
from distlaunch.core.model.record import Record, defaults_of, fields_of, plain, replace


class Point(Record):
    x: int
    y: int = 2

    @property
    def total(self) -> int:
        return self.x + self.y


class Named(Point, hide=("secret",)):
    name: str
    secret: str = "s3"


class Checked(Record):
    low: int
    high: int = 10

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"{self.low} > {self.high}")


class Twin(Record):
    x: int
    y: int = 2


def test_fields_are_passed_by_name_and_have_defaults():
    assert (Point(x=1).x, Point(x=1).y, Point(y=5, x=1).y, Point(x=1).total) == (1, 2, 5, 3)


@pytest.mark.parametrize(
    "arguments", [{}, {"y": 1}, {"x": 1, "z": 2}, {"x": 1, "y": 2, "z": 3}, {"y": 1, "z": 2}]
)
def test_missing_and_unknown_fields_are_named(arguments):
    with pytest.raises(TypeError) as caught:
        Point(**arguments)
    message = str(caught.value)
    assert "Point" in message
    assert ("'x'" in message.partition("unknown")[0]) == ("x" not in arguments)
    assert ("'z'" in message.partition("unknown")[2]) == ("z" in arguments)


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        Point(1)


def test_a_record_is_frozen_and_slotted():
    point = Point(x=1)
    with pytest.raises(AttributeError, match="Point is frozen"):
        point.x = 2
    with pytest.raises(AttributeError):
        point.other = 2
    with pytest.raises(AttributeError, match="Point is frozen"):
        del point.x
    assert not hasattr(point, "__dict__")
    assert not hasattr(Named(x=1, name="a"), "__dict__")
    assert point == Point(x=1)


def test_equality_and_hash_depend_on_type_and_values():
    assert Point(x=1) == Point(x=1, y=2)
    assert Point(x=1) != Point(x=2)
    assert Point(x=1) != Twin(x=1)
    assert Point(x=1) != (1, 2)
    assert len({Point(x=1), Point(x=1), Point(x=2), Twin(x=1)}) == 3


def test_other_types_may_decide_about_equality():
    assert Point(x=1) == mock.ANY


def test_a_record_with_something_unhashable_in_it_is_unhashable():
    with pytest.raises(TypeError):
        hash(Point(x=[]))


def test_repr_omits_hidden_fields():
    assert repr(Point(x=1)) == "Point(x=1, y=2)"
    assert repr(Named(x=1, name="a", secret="pw")) == "Named(x=1, y=2, name='a')"


def test_hidden_fields_are_inherited():
    class Child(Named, hide=("name",)):
        more: int = 0

    assert repr(Child(x=1, name="a", secret="pw")) == "Child(x=1, y=2, more=0)"


def test_inherited_fields_come_first_with_their_defaults():
    assert list(fields_of(Named)) == ["x", "y", "name", "secret"]
    assert fields_of(Point) == {"x": "int", "y": "int"}
    assert defaults_of(Named) == {"y": 2, "secret": "s3"}
    assert isinstance(Named(x=1, name="a"), Point)
    assert Named(x=1, name="a").total == 3


def test_a_child_may_change_a_default_without_changing_its_parent():
    class Other(Point):
        y: int = 7

    assert (Other(x=1).y, Point(x=1).y) == (7, 2)


def test_returned_fields_are_copies():
    fields_of(Point).clear()
    defaults_of(Point).clear()
    assert Point(x=1).y == 2


def test_an_invalid_record_cannot_be_created():
    with pytest.raises(ValueError, match="11 > 10"):
        Checked(low=11)
    with pytest.raises(ValueError, match="5 > 3"):
        replace(Checked(low=5), high=3)


def test_replace_returns_a_changed_copy():
    point = Point(x=1)
    assert replace(point, y=9) == Point(x=1, y=9)
    assert point.y == 2
    named = replace(Named(x=1, name="a", secret="pw"), x=5)
    assert (type(named), named.secret) == (Named, "pw")
    with pytest.raises(TypeError):
        replace(point, z=1)


@pytest.mark.parametrize(
    "copied", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy]
)
def test_copies_and_pickles_are_equal(copied):
    assert copied(Point(x=1, y=3)) == Point(x=1, y=3)


def test_a_record_matches_by_its_fields():
    match Named(x=1, name="a"):
        case Named(x=x, name="a"):
            assert x == 1
        case other:
            pytest.fail(f"no match: {other}")


def test_plain_returns_json_types():
    value = {1: (Point(x=True), [None, 1.5]), "k": Named(x=1, name="n")}
    assert plain(value) == {
        "1": [{"x": True, "y": 2}, [None, 1.5]],
        "k": {"x": 1, "y": 2, "name": "n", "secret": "s3"},
    }


@pytest.mark.parametrize("value", [{1, 2}, b"raw", object(), (b"x",)])
def test_plain_refuses_other_types(value):
    with pytest.raises(TypeError, match="plain data"):
        plain(value)


# --- many of one class


class Empty(Record):
    pass


class Many(Record, hide=("secret",)):
    x: int
    y: int = 2
    secret: str = "s3"

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError(self.x)


class More(Many):
    z: int = 4


@pytest.fixture(params=["few", "many"])
def count(request):
    return 1 if request.param == "few" else 2 * record._MANY


def test_a_compiled_init_behaves_like_the_shared_one(count):
    for number in range(count):
        assert Many(x=number).x == number
        assert Empty() == Empty()
    made = Many(x=1, secret="t")
    assert (made.x, made.y, made.secret) == (1, 2, "t")
    assert made == Many(y=2, x=1, secret="t") != Many(x=1)
    assert repr(made) == "Many(x=1, y=2)"
    assert replace(made, y=5).y == 5
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(AttributeError):
        made.x = 2
    with pytest.raises(ValueError):
        Many(x=-1)
    for wrong in ({}, {"y": 1}, {"x": 1, "w": 2}):
        with pytest.raises(TypeError):
            Many(**wrong)
    with pytest.raises(TypeError):
        Many(1)


def test_a_subclass_has_its_own_fields_however_many_there_are_of_its_parent(count):
    for _ in range(count):
        Many(x=1)
    more = More(x=1, z=9)
    assert (more.x, more.y, more.z) == (1, 2, 9)
    for _ in range(count):
        assert More(x=3).z == 4
    with pytest.raises(ValueError):
        More(x=-1)
