# SPDX-License-Identifier: Apache-2.0
"""The page size is SGLang's own, or one with which its attention backends stay. SGLang's resolution is a table here: it
picks the first row that fits what it is given."""

import copy
import os
from types import SimpleNamespace

import pytest

from banyan.config import Config
from banyan.sglang_plugin.launcher import page_size
from banyan.sglang_plugin.launcher.page_size import Choice


class Arguments(SimpleNamespace):
    def __init__(self, **fields):
        super().__init__(page_size=None, attention_backend=None, **fields)


def same(page_tokens, backend):
    return Choice(page_tokens or 1, backend, backend)


@pytest.fixture
def sglang(monkeypatch):
    """Resolves arguments as ``choose`` says of a page size and a backend."""
    monkeypatch.setattr(page_size, "choice_of", lambda args: args.made)
    asked = []

    def resolving(choose):
        def resolve(args):
            asked.append(copy.copy(args))
            os.environ["SGLANG_SET_BY_RESOLUTION"] = "1"
            args.made = choose(args.page_size, args.attention_backend)

        return resolve

    resolving.asked = asked
    return resolving


def settled(resolve, args, share="peer"):
    expected = page_size.alone(resolve, args)
    page_size.settle(resolve, args, expected, Config(share=share))
    return args


def test_page_size_when_sglang_chooses_one_of_several_tokens_then_it_is_left_to_it(sglang):
    resolve = sglang(lambda page, backend: Choice(page or 64, "trtllm_mha", "trtllm_mha"))
    args = settled(resolve, Arguments())
    assert args.page_size is None and len(sglang.asked) == 1
    assert not sglang.asked[0].enable_unified_cache_external_linker


def test_page_size_when_sglang_chooses_single_tokens_then_the_first_with_which_its_backend_stays(sglang):
    resolve = sglang(lambda page, backend: same(page, "fa3" if page in (None, 64) else "flashinfer"))
    assert settled(resolve, Arguments()).page_size == 64


def test_page_size_when_no_size_keeps_the_backend_then_it_is_named(sglang):
    resolve = sglang(lambda page, backend: same(page, backend or ("flashinfer" if page else "fa3")))
    args = settled(resolve, Arguments())
    assert (args.page_size, args.attention_backend) == (16, "fa3")


def test_page_size_when_nothing_keeps_the_backend_then_sixteen_tokens_and_a_line(sglang, caplog):
    resolve = sglang(lambda page, backend: same(page, "flashinfer" if page else "fa3"))
    assert settled(resolve, Arguments()).page_size == 16
    assert "attention fa3" in caplog.text


def test_page_size_when_the_user_names_it_then_it_stays(sglang):
    args = Arguments()
    args.page_size = 32
    resolve = sglang(lambda page, backend: Choice(page or 64, "trtllm_mha", "trtllm_mha"))
    assert settled(resolve, args).page_size == 32


def test_page_size_when_sglang_refuses_the_arguments_then_sixteen_and_its_own_words_later(sglang):
    def refuse(page, backend):
        raise ValueError("no")

    assert settled(sglang(refuse), Arguments()).page_size == 16


@pytest.mark.parametrize(("share", "page_tokens"), [("off", None), ("peer", 16)])
def test_page_size_when_sglang_knows_no_pages_of_several_tokens_then_it_keeps_its_own_where_nothing_is_shared(
    sglang, share, page_tokens
):
    def refuse_pages(page, backend):
        assert page in (None, 1), "no_buffer only supports page_size=1."
        return same(page, "fa3")

    assert settled(sglang(refuse_pages), Arguments(), share).page_size == page_tokens


def test_environment_when_sglang_is_asked_then_it_is_as_before(sglang, monkeypatch):
    monkeypatch.delenv("SGLANG_SET_BY_RESOLUTION", raising=False)
    settled(sglang(lambda page, backend: same(page, "fa3")), Arguments())
    assert "SGLANG_SET_BY_RESOLUTION" not in os.environ


def test_choices_when_compared_then_single_tokens_may_become_pages_and_nothing_else_may_change():
    found, unlike = same(16, "fa3"), Choice(1, "flashinfer", "fa3", "triton")
    kept = [
        page_size.compared(found, expected)["is_kept"] for expected in (None, same(1, "fa3"), same(64, "fa3"), unlike)
    ]
    assert kept == [True, True, False, False]
    assert (
        page_size.compared(found, unlike)["without"]
        == "page size 1, attention flashinfer (prefill), fa3 (decode), triton (drafts)"
    )
