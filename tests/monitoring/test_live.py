"""`megalite report --live`: one run's page, for this machine alone."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import yaml

from megalite.commands import report
from megalite.config.load import from_dict, to_dict
from megalite.monitoring.report import live
from megalite.monitoring.report.live import LivePage, LiveServer
from tests.monitoring.test_report import write_run

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run that is about to start: no step, and an environment file of which half is written."""
    directory = tmp_path / "<img src=x onerror=alert(2)> $\\frac$"
    directory.mkdir()
    config = {
        "model": {"preset": "tiny", "vocab_size": 257},
        "parallel": {"dp": 1},
        "data": {"train": EVIL},
        "run": {"name": EVIL},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(to_dict(from_dict(config))))
    (directory / "environment.json").write_text('{"torch": "2.')
    return directory


@pytest.fixture
def server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(live, "REFRESH_S", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    with LiveServer(LivePage(directory)) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: LiveServer, path: str = "/", method: str = "GET", host: str | None = None, **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.server_port}" if host is None else host, **headers}.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def test_it_listens_to_this_machine_only_and_serves_its_page_and_nothing_else(server):
    assert server.server_address[0] == "127.0.0.1"
    for path in (
        "/config.yaml",
        "/metrics.jsonl",
        "/../",
        "/%2e%2e/x",
        "/content/",
        "/?",
        "/favicon.ico",
        "/etc/passwd",
    ):
        assert ask(server, path).status == 404, path
    assert [ask(server, method=method).status for method in ("POST", "PUT", "DELETE", "OPTIONS")] == [501] * 4


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost:evil", "", "0.0.0.0", "[::1]:80"]
)
def test_a_name_that_someone_else_lets_resolve_to_this_machine_is_refused(server, host):
    answer = ask(server, host=host)
    assert answer.status == 403 and b"alert" not in answer.read()


def test_the_other_end_of_a_tunnel_is_served(server):
    assert [ask(server, host=host).status for host in ("localhost:9000", "localhost", "127.0.0.1")] == [200] * 3


def test_nothing_of_the_run_is_run(server, directory):
    (directory / "summary.json").write_text(json.dumps({"state": "failed", "reason": EVIL}))
    answer = ask(server)
    page = answer.read().decode()
    assert page.count("<script>") == 1 and "<img" not in page, "the page's own script alone"
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 3, (
        "the data, the run's name and the reason of its end are shown"
    )
    policy = answer.headers["Content-Security-Policy"]
    assert (
        f"script-src '{live.ALLOWED_SCRIPT}'" in policy
        and "default-src 'none'" in policy
        and policy.count("unsafe") == 1
    )
    assert (
        answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Access-Control-Allow-Origin"] is None
    )


def test_the_page_follows_the_run_from_before_its_first_step_to_its_end(server, directory):
    first = ask(server, "/content")
    assert "0 of" in first.read().decode()
    tag = first.headers["ETag"]
    same = ask(server, "/content", **{"If-None-Match": tag})
    assert (same.status, same.read()) == (304, b"")
    line = {"step": 1, "loss": 5.4321, "tokens": 100, "step_time_s": 0.5}
    (directory / "metrics.jsonl").write_bytes(json.dumps(line).encode() + b'\n{"step": 2, "loss": 4.3, "na\xc3')
    stepped = ask(server, "/content", **{"If-None-Match": tag})
    assert stepped.status == 200 and "5.4321" in stepped.read().decode() and stepped.headers["ETag"] != tag
    (directory / "config.yaml").unlink()
    assert "config.yaml: " in ask(server, "/content").read().decode(), "the directory was moved aside"


def test_a_run_that_is_silent_is_told_apart_from_one_that_runs(directory, monkeypatch):
    """A killed run stays "running" in its summary: the page says for how long no step has been written."""
    now = [1000.0]
    monkeypatch.setattr(live, "time", lambda: now[0])
    (directory / "summary.json").write_text('{"state": "running"}')
    (directory / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 5.0, "tokens": 100, "step_time_s": 20.0}) + "\n"
    )
    os.utime(directory / "metrics.jsonl", (1000.0, 1000.0))
    page = LivePage(directory, clock=lambda: now[0])
    for seconds, silent in ((1.0, False), (150.0, False), (250.0, True)):
        now[0] = 1000.0 + seconds
        assert ("no steps written for 4 min 10 s" in page.content()[0]) == silent, seconds
        assert "Time left" in page.content()[0]
    (directory / "summary.json").write_text('{"state": "done"}')
    now[0] += 60.0
    assert "no steps written" not in page.content()[0] and "Time left" not in page.content()[0]


def test_a_run_that_changes_all_the_time_is_drawn_a_tenth_of_the_time(directory, monkeypatch):
    now, drawn = [0.0], []

    def draw(runs: object) -> str:
        now[0] += 3.0
        drawn.append(now[0])
        return "drawn"

    monkeypatch.setattr(live, "content", draw)
    page = LivePage(directory, clock=lambda: now[0])
    for second in range(70):
        now[0] = max(now[0], float(second))
        (directory / "metrics.jsonl").write_text("\n" * second)
        page.content()
    assert drawn == [3.0, 36.0, 69.0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([__file__], "is not a directory"),
        (["a", "b"], "serves the page of a single run"),
        (["a", "--output", "b"], "serves the page of a single run"),
        ([".", "--port", "70000"], "--port 70000"),
    ],
)
def test_what_can_not_be_served_is_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main(["--live", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and said.count("\n") == 1


def test_the_address_is_printed_and_ctrl_c_ends_it(tmp_path, monkeypatch, capsys):
    def press(server: LiveServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", press)
    directory = write_run(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        report.main(["--live", str(directory)])
    assert capsys.readouterr().out.startswith(f"serving {directory} at http")


def test_a_run_that_has_not_begun_is_waited_for(tmp_path, monkeypatch, capsys):
    directory, looks = tmp_path / "run", list[float]()

    def begins_later(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            directory.mkdir()

    monkeypatch.setattr(report.time, "sleep", begins_later)
    monkeypatch.setattr(LiveServer, "serve_forever", lambda server: None)
    report.main(["--live", str(directory)])
    said = capsys.readouterr()
    assert (
        len(looks) == 2
        and said.err == f"waiting for {directory} …\n"
        and said.out.startswith(f"serving {directory} at")
    )
