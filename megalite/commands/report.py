"""Write one HTML page about a run, or a comparison of several; or serve the page of a run that is training.

    megalite report runs/run
    megalite report runs/a runs/b --output comparison.html      the page of `megalite compare`
    megalite report --live runs/run [--port 8000]               refreshed in the browser; Ctrl-C ends it

Writes report.html into the (first) run's directory: loss, learning rate, gradient norm, throughput, memory,
the pipeline's timeline, predictions and measurements, configuration and environment. The page is
self-contained; a run may still be training.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from megalite.commands.parser import Parser, as_new_file, as_path, progress_of, write_whole
from megalite.config import run_files
from megalite.monitoring.report.page import page
from megalite.monitoring.report.run import RecordedRun, ReportError, read_all
from megalite.stores.url import is_url
from megalite.system.messages import say

WAIT_S = 0.5  # between looks for the directory of a run that is about to begin


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    if options.live:
        serve(tool, options)
        return
    options.runs = [fetched_run_files(tool, path) if is_url(path) else path for path in options.runs]
    output = options.output or options.runs[0] / run_files.REPORT
    runs = write_page(tool, options.runs, output, options.json)
    print(json.dumps({"report": str(output), "runs": [run.name for run in runs]}) if options.json else output)


def fetched_run_files(tool: Parser, url: Path) -> Path:
    """Copy the files of a run in an object store. Exits with an error message if that fails."""
    from megalite.stores.errors import StoreError
    from megalite.stores.stubs import fetched_files

    try:
        return fetched_files(str(url))
    except StoreError as error:
        tool.error(error)


def write_page(
    tool: Parser, directories: list[Path], output: Path | None, as_json: bool = False
) -> list[RecordedRun]:
    """Read the runs and write their page if a path is given.

    Exits with an error message if that fails.
    """
    try:
        with progress_of(as_json) as progress:
            progress("reading the runs")
            runs = read_all(directories)
            progress("drawing the page")
            if output is not None:
                write_whole(output, page(runs))
    except ReportError as error:
        tool.error(error)
    except OSError as error:
        tool.error(f"{output} cannot be written: {error.strerror}. Choose another file with --output.")
    return runs


def serve(tool: Parser, options: argparse.Namespace) -> None:
    """Serve the run's page until Ctrl-C."""
    from megalite.monitoring.report.live import LivePage, LiveServer

    if len(options.runs) > 1 or options.output is not None:
        tool.error(
            "--live serves the page of a single run and writes no file. Pass one run directory and "
            "remove --output."
        )
    directory = options.runs[0]
    if is_url(directory):
        tool.error(f"--live does not read {directory}. Pass the run's directory in run.spool.")
    try:
        server = LiveServer(LivePage(directory), options.port)
    except (OSError, OverflowError) as error:
        tool.error(
            f"--port {options.port}: {getattr(error, 'strerror', None) or error}. Choose another port, or "
            "omit --port to use a free one."
        )
    with server:
        wait_for(tool, directory)
        print(
            json.dumps({"url": server.url})
            if options.json
            else f"serving {directory} at {server.url} (press Ctrl-C to stop)",
            flush=True,
        )
        server.serve_forever()


def wait_for(tool: Parser, directory: Path) -> None:
    """Wait until a run has created its directory."""
    if directory.exists() and not directory.is_dir():
        tool.error(
            f"{directory} is not a directory. Pass a run directory; the run does not have to be started yet."
        )
    if not directory.exists():
        say(f"waiting for {directory} …")
    while not directory.is_dir():
        time.sleep(WAIT_S)


def parser() -> Parser:
    tool = Parser(description=__doc__)
    add = tool.add_argument
    add(
        "runs",
        type=as_path,
        nargs="+",
        metavar="RUN_DIR",
        help="run directories; if several are given, they are compared",
    )
    add(
        "--output",
        type=as_new_file,
        metavar="FILE.html",
        help="output file (default: report.html in the first run's directory)",
    )
    add(
        "--live",
        action="store_true",
        help="serve the page on this machine, at 127.0.0.1, while the run trains",
    )
    add("--port", type=int, default=0, metavar="N", help="port of --live (default: a free one)")
    add(
        "--json",
        action="store_true",
        help="print only one JSON object, with the page's path or address, on stdout",
    )
    return tool
