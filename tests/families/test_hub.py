"""Models of the Hugging Face Hub, from a cache in its layout; there is no network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.config.load import load_config
from megalite.families import hub
from megalite.training import dry_run
from tests.families.hub_cache import INDEX, SHAPE, SHARD, TOKENIZER, hub_cache, store


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with hub_cache(tmp_path) as directory:
        yield directory


def refusal(part: hub.Part) -> str:
    with pytest.raises(ConfigError) as error:
        hub.directory("org/name", part, "model.from_hf = org/name")
    return str(error.value)


def test_what_is_cached_is_used_offline(cache: Path):
    stored = store(cache, "org/name", {**SHAPE, **TOKENIZER, "model.safetensors": ""})
    assert [hub.directory("org/name", part) for part in ("shape", "tokenizer", "weights")] == [str(stored)] * 3  # type: ignore[arg-type]


def test_what_is_not_cached_is_one_message_with_the_command_that_fetches_it(cache: Path):
    assert refusal("shape") == (
        "model.from_hf = org/name is neither a directory here nor in the cache of the Hugging Face Hub, and the Hub "
        "cannot be reached. "
        "Where there is a network: hf download org/name (the cache is in HF_HOME); or give a directory."
    )
    store(cache, "org/name", SHAPE)
    assert "is in the cache of the Hugging Face Hub without its tokenizer, and the Hub cannot" in refusal("tokenizer")


def test_a_download_that_was_interrupted_is_not_complete(cache: Path):
    store(cache, "org/name", {**SHAPE, **INDEX})
    assert "without its weights in safetensors" in refusal("weights")
    stored = store(cache, "org/name", {SHARD: ""})
    assert hub.directory("org/name", "weights") == str(stored)


def test_a_directory_of_the_cache_is_shown_by_its_name(cache: Path):
    stored = store(cache, "org/some--name.v2", SHAPE)
    assert hub.repository(str(stored)) == "org/some--name.v2" and hub.repository("models/llama") == "models/llama"


@pytest.mark.parametrize(
    "name",
    [
        "models/my--model",
        "org/a..b",
        "org/name.git",
        "org/name-",
        "models/llama",
        "./org/name",
        "/org/name",
        "a/b/c",
        "name",
        "data/tokenizer.model",
        "configs/run.yaml",
    ],
)
def test_paths_are_not_taken_for_ids(cache: Path, name: str):
    Path("models").mkdir()
    assert hub.directory(name, "shape") == name


def test_only_what_is_needed_is_fetched_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    calls: list[dict[str, Any]] = []
    with hub_cache(tmp_path, online=True) as cache:

        def download(name: str, **options: Any) -> None:
            calls.append(options)
            store(cache, name, {**SHAPE, "model.safetensors": ""})

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        first = hub.directory("org/name", "weights")
        assert hub.directory("org/name", "weights") == first and len(calls) == 1
    assert "fetching org/name" in capsys.readouterr().err
    from huggingface_hub.utils import filter_repo_objects

    theirs = [
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "original/params.json",
        "x.gguf",
    ]
    kept = filter_repo_objects(
        theirs, allow_patterns=calls[0]["allow_patterns"], ignore_patterns=calls[0]["ignore_patterns"]
    )
    assert list(kept) == theirs[:3]


def test_an_interrupted_download_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even if the files that it has brought look complete; the other local ranks wait for it."""
    with hub_cache(tmp_path, online=True) as cache:

        def interrupted(name: str, **options: Any) -> None:
            store(cache, name, {**SHAPE, "model.safetensors": ""})
            raise KeyboardInterrupt

        other = threading.Thread(target=hub.directory, args=("org/name", "weights"))

        def resumed(name: str, **options: Any) -> None:
            monkeypatch.setenv("LOCAL_RANK", "1")
            other.start()
            other.join(0.2)
            assert other.is_alive()
            store(cache, name, TOKENIZER)

        monkeypatch.setattr("huggingface_hub.snapshot_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hub.directory("org/name", "weights")
        with pytest.MonkeyPatch.context() as offline:
            offline.setattr(hub, "online", lambda: False)
            path = Path(hub.directory("org/name", "weights"))
        monkeypatch.setattr("huggingface_hub.snapshot_download", resumed)
        assert hub.directory("org/name", "weights") == str(path) and (path / "tokenizer.json").is_file()
        other.join()
        monkeypatch.setattr(
            "huggingface_hub.snapshot_download", lambda *words, **options: pytest.fail("it is complete")
        )
        hub.directory("org/name", "weights")


def test_settings_without_a_vocabulary_are_no_tokenizer(cache: Path):
    store(cache, "org/name", {**SHAPE, "tokenizer_config.json": "{}"})
    assert "without its tokenizer" in refusal("tokenizer")


def test_an_error_of_the_hub_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def download(name: str, **options: Any) -> None:
        raise OSError("401 Client Error.\nRepository Not Found")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with hub_cache(tmp_path, online=True):
        assert "could not be downloaded from the Hugging Face Hub: 401 Client Error. Check the name" in refusal("shape")


def test_other_local_ranks_wait_for_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *words, **options: pytest.fail("only local rank 0 fetches")
    )
    with hub_cache(tmp_path, online=True) as cache:
        other = threading.Timer(0.2, store, (cache, "org/name", SHAPE))
        other.start()
        path = hub.directory("org/name", "shape")
        other.join()
        assert path == str(store(cache, "org/name", {}))
        monkeypatch.setattr(hub, "PATIENCE_S", 0.0)
        with pytest.raises(ConfigError, match="org/other"):
            hub.directory("org/other", "shape")


def test_a_run_takes_shape_and_weights_from_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch):
    stored = store(cache, "org/name", SHAPE)
    options = ["--model.from_hf", "org/name", "--model.init_from", "hf:org/name"]
    config = dry_run.read(options, 1)
    assert (config.model.hidden_size, config.model.from_hf) == (48, str(stored))
    assert config.model.init_from == "hf:org/name", "a dry run fetches no weights"
    with pytest.raises(SystemExit):
        load_config(options, world_size=1)
    store(cache, "org/name", {"model.safetensors": ""})
    monkeypatch.setattr("megalite.config.load.check", lambda *words: None)
    assert load_config(options, world_size=1).model.init_from == f"hf:{stored}"


@pytest.mark.parametrize(
    "option, objective", [("distillation.teacher", "distillation"), ("preference.reference", "dpo")]
)
def test_a_run_takes_a_second_model_from_the_hub(
    option: str, objective: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = ["--model.preset", "tiny", "--train.objective", objective, f"--{option}", "hf:org/name"]
    monkeypatch.setattr("megalite.config.load.check", lambda *words: None)
    with pytest.raises(SystemExit):
        load_config(options, world_size=1)
    assert f"{option} = hf:org/name is neither a directory here nor in the cache" in capsys.readouterr().err
    stored = store(cache, "org/name", {**SHAPE, **TOKENIZER, "model.safetensors": ""})
    assert attrgetter(option)(load_config(options, world_size=1)) == f"hf:{stored}"


def test_the_hub_is_asked_once_and_briefly(monkeypatch: pytest.MonkeyPatch):
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *words: object) -> None:
            pass

    hub.online.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(hub, "PROBE_S", 0.3)
    try:
        with HTTPServer(("127.0.0.1", 0), Refuses) as server:
            threading.Thread(target=server.handle_request, daemon=True).start()
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
            assert hub.online(), "an error of the server is an answer"
        hub.online.cache_clear()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            assert not hub.online()
        hub.online.cache_clear()
        monkeypatch.setenv("HF_ENDPOINT", "hf-mirror.com")
        assert not hub.online() and "(HF_ENDPOINT = hf-mirror.com)" in refusal("shape")
        hub.online.cache_clear()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not hub.online()
    finally:
        hub.online.cache_clear()
