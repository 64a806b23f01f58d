"""Stop requests, with real signals to this process."""

import os
import signal
import threading

import pytest

from megalite.training import stop_requests
from megalite.training.stop_requests import StopRequest


@pytest.fixture(autouse=True)
def harmless():
    """Outside a StopRequest the signals are recorded here instead of ending pytest."""
    received = []
    previous = {
        each: signal.signal(each, lambda number, frame: received.append(number))
        for each in (signal.SIGTERM, signal.SIGUSR1)
    }
    yield received
    for each, handler in previous.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_a_request_and_not_the_end(name, harmless):
    with StopRequest() as request:
        assert request.reason is None
        os.kill(os.getpid(), getattr(signal, name))
        assert request.reason == f"received {name}"
    assert harmless == []


def test_the_handlers_before_are_restored(harmless):
    with StopRequest() as request:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert harmless == [signal.SIGTERM] and request.reason is None


def test_after_an_error_a_signal_does_not_end_the_process_before_it_has_said_why(harmless):
    with pytest.raises(RuntimeError), StopRequest() as request:
        raise RuntimeError
    os.kill(os.getpid(), signal.SIGTERM)
    assert harmless == [] and request.reason == "received SIGTERM"
    request.close()


def test_the_time_limit_is_a_request(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stop_requests, "monotonic", lambda: now[0])
    with StopRequest(seconds=5) as request, StopRequest(seconds=60) as later:
        assert request.reason is None
        now[0] += 4.9
        assert request.reason is None
        now[0] += 0.2
        assert request.reason == "reached train.stop_after" and later.reason is None


def test_outside_the_main_thread_no_handler_is_installed(harmless):
    """Python refuses handlers there; a trainer that runs in a thread still has its time limit."""
    reasons = []

    def run():
        with StopRequest(seconds=0) as request:
            reasons.append(request.reason)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    assert reasons == ["reached train.stop_after"] and harmless == [signal.SIGTERM]
