"""Exceptions and wire codes stand for each other, one to one, and carry what the wire said."""

import pickle

import msgspec
import pytest

from enginepool import errors
from enginepool.client.row_calls import ROW_NAMES
from enginepool.coordinator.shell.decode import refusal
from enginepool.protocol.errors import CODES, WireError
from enginepool.protocol.messages import ErrorReply


def test_every_wire_code_has_its_own_exception_with_the_facts_of_the_table():
    assert errors.BY_CODE.keys() >= CODES.keys()
    for code, facts in CODES.items():
        cls = errors.BY_CODE[code]
        assert (cls.code, cls.fault, cls.retry) == (code, facts.fault, facts.retry)
        assert getattr(errors, cls.__name__) is cls


def test_local_codes_never_travel():
    assert errors.BY_CODE.keys() - CODES.keys() == {
        "closed", "config", "connect", "interrupted", "session_busy", "session_closed", "session_expired",
    }  # fmt: skip


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_a_failure_becomes_an_exception_that_says_it_all_and_survives_pickling(code: str):
    failure = ErrorReply(
        code, "items[3]: too long", field="items[3]", limit="512", retry_after_ms=250, evidence=["exit code 3"]
    )
    error = pickle.loads(pickle.dumps(errors.error_from(failure)))
    assert type(error) is errors.BY_CODE[code]
    assert isinstance(error, errors.EnginepoolError)
    assert (error.field, error.limit, error.evidence, error.retry_after_s) == ("items[3]", "512", ("exit code 3",), 0.25)
    assert str(error) == "items[3]: too long (limit: 512)\n  exit code 3"


def test_a_code_of_a_newer_protocol_is_still_an_error_that_names_its_code():
    error = errors.error_from(ErrorReply("quota_exceeded", "no more"))
    assert type(error) is errors.EnginepoolError
    assert (error.code, error.fault, error.retry, str(error)) == ("quota_exceeded", "pool", False, "no more")


def test_fields_are_named_as_the_caller_knows_them():
    failure = ErrorReply("bad_request", "labels[1]: too large", field="labels[1]")
    error = errors.error_from(failure, {"labels": "label_token_ids"})
    assert (error.field, str(error)) == ("label_token_ids[1]", "label_token_ids[1]: too large")


def test_a_call_that_a_group_does_not_serve_is_about_the_group_and_one_that_a_role_may_not_make_is_not():
    text = "type: generate is not an operation of this group; its workers have: score"
    unserved = errors.error_from(ErrorReply("bad_request", text, field="type"), ROW_NAMES)
    assert (unserved.field, str(unserved).partition(" ")[0]) == ("group", "group:")
    forbidden = errors.error_from(ErrorReply("forbidden", "type: score needs the role client", field="type"), ROW_NAMES)
    assert (forbidden.field, str(forbidden)) == ("type", "type: score needs the role client")


def test_errors_are_caught_by_the_builtin_names_that_fit():
    assert issubclass(errors.BadRequest, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.ConnectError, ConnectionError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.UnknownGroup, LookupError)


@pytest.mark.parametrize(
    ("header", "id_", "incarnation"),
    [
        ({"type": "hello", "incarnation": 5}, None, 5),
        ({"type": "hello"}, None, 0),
        ({"type": "score", "id": 7, "incarnation": 5}, 7, None),
        ({"id": 7, "frames": []}, 7, None),
        ({"type": 5, "id": 7}, 7, None),
    ],
)
def test_of_refusals_those_of_a_hello_alone_have_an_incarnation(
    header: dict[str, object], id_: int | None, incarnation: int | None
) -> None:
    found = refusal(msgspec.msgpack.encode(header), WireError("bad_request", "no"))
    assert (found.id, found.incarnation) == (id_, incarnation)
