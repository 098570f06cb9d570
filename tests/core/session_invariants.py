"""What must hold in the state of a client's session between events. Tests and the simulator check it."""

# pyright: reportPrivateUsage=false

from math import inf

from enginepool.client.session.acknowledgements import Acknowledgements
from enginepool.client.session.link_state import LinkState
from enginepool.client.session.machine import ClientSession
from enginepool.client.session.pending_requests import PendingRequests
from enginepool.client.session.questions import PendingQuestions
from enginepool.client.session.updates import Updates


def check_session(session: ClientSession) -> None:
    """Every invariant of the session. Costs time in proportion to what is pending."""
    stands = session.link.stands
    check_link(session.link)
    check_requests(session.calls)
    check_questions(session.questions)
    check_updates(session.updates, stands)
    check_acknowledgements(session._acks, stands)
    assert session.calls.open == stands, "requests are sent on a standing link, and then always"
    assert all(id_ <= session._last_id for id_ in session.calls.by_id), "ids only grow"
    pending = session.calls.by_id or session.questions.by_id or session.updates.by_id
    assert session.link.state != "ended" or not (pending or session.wake_at < inf), "an ended session waits"


def check_link(link: LinkState) -> None:
    assert (link.state == "greeting") == (link._hello_at < inf), "an unanswered Hello is said again"
    assert (link.state == "greeting") == (link._greet_by < inf), "greeting ends"
    assert (link.state == "welcomed") == (link._ping_at < inf), "a standing link is pinged"
    assert link.state != "welcomed" or link._connect_by == inf, "connected, and still to connect"


def check_requests(calls: PendingRequests) -> None:
    counted = [call for call in calls.by_id.values() if call.counted]
    assert calls.used == len(counted), "window: requests"
    assert calls.used_bytes == sum(call.charge for call in counted), "window: bytes"
    waiting, timers = set(calls._waiting), set(calls._timers)
    for id_, call in calls.by_id.items():
        place, due = call.place, call.due
        assert call.id == id_, f"{call} is kept under id {id_}"
        if place == "sent":
            assert calls.open and call.counted and call.held, f"request {id_} ({place}) without a link"
        else:
            assert not call.counted or place == "cancelling", f"request {id_} ({place}) occupies the window"
            queued = place != "waiting" or (-call.request.priority, id_) in waiting
            assert queued, f"request {id_} ({place}) is not in the queue"
        if due < inf:
            assert (due, id_) in timers, f"request {id_} ({place}) has no timer"
        else:
            assert call.deadline is None, f"request {id_} ({place}) would outlive its deadline"
            assert place in ("waiting", "sent"), f"request {id_} ({place}) would stay there"
        if (stream := call.stream) is not None:
            assert 0 <= stream.taken <= stream.received >= stream._said >= stream._base >= 0, f"request {id_}: credit"
            assert stream.received == sum(len(one.tokens) - one.start for one in stream.sequences), f"request {id_}: tokens"
            for one in stream.sequences:
                assert sum(count for _, count in one.spans) == len(one.tokens) - one.start, f"request {id_}: spans"
                width = stream._request.width
                assert len(one.logprobs) == width * (len(one.tokens) - one.start), f"request {id_}: logprobs"
                row = stream._row
                assert len(one.hidden_states) == row * (len(one.tokens) - one.start), f"request {id_}: hidden states"


def check_questions(questions: PendingQuestions) -> None:
    times = [time for one in questions.by_id.values() for time in (one.deadline, one.again_at)]
    assert questions.wake_at == min(times, default=inf), "questions have a time"


def check_updates(updates: Updates, stands: bool) -> None:
    assert updates._open == stands, "updates are spoken of on a standing link, and then always"
    for id_, update in updates.by_id.items():
        assert update.id == id_, f"update {id_} is kept under another id"
        assert not updates._open or update.said, f"update {id_} was not opened"
        assert not updates._open or updates.wake_at <= update.renew_at < inf, f"update {id_} is not renewed"
        assert updates.wake_at <= update.deadline, f"update {id_} would outlive its deadline"
        assert update.place == "open" or update.may_be_committed, f"update {id_}: nothing to ask about"


def check_acknowledgements(acks: Acknowledgements, stands: bool) -> None:
    assert not stands or len(acks._ids) < acks.settings.ack_batch, "acknowledgements pile up"
    assert not stands or bool(acks._ids) == (acks.wake_at < inf), "acknowledgements have a time"
