# SPDX-License-Identifier: Apache-2.0
import json
import logging

from banyan.telemetry import log_as_json


def test_lines_when_they_are_json_then_one_object_each_and_the_log_around_does_not_have_them_too(capsys):
    logger = logging.getLogger("banyan-test-lines")
    logger.setLevel(logging.INFO)
    for _ in range(2):
        log_as_json(logger, process="scheduler", dp_rank=1)
    logger.info('banyan: store on %s: "fast"\nsecond', "/nvme0")
    logging.getLogger("banyan-test-lines.below").warning("down")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "banyan-test-lines",
        "process": "scheduler",
        "dp_rank": 1,
        "message": 'store on /nvme0: "fast"\nsecond',
    }
    assert (second["level"], second["message"]) == ("warning", "down") and not logger.propagate


def test_lines_when_there_was_an_exception_then_it_is_in_the_object(capsys):
    logger = logging.getLogger("banyan-test-exception")
    log_as_json(logger)
    try:
        raise ValueError("odd")
    except ValueError:
        logger.exception("banyan: failed")
    assert "ValueError: odd" in json.loads(capsys.readouterr().err)["exception"]
