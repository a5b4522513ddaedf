# SPDX-License-Identifier: Apache-2.0
import json
import subprocess

import pytest

from banyan import cli
from banyan.cli.size import block_of, capacity

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
DEEPSEEK = {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "value_bytes", "token_bytes"),
    [
        (LLAMA, 2, 131_072),
        (LLAMA, 1, 65_536),
        ({**LLAMA, "head_dim": 64}, 2, 65_536),
        (DEEPSEEK, 2, 70_272),
        ({**DEEPSEEK, "index_head_dim": 128}, 2, 70_272 + 61 * 132),
        ({"text_config": LLAMA}, 2, 131_072),
        ({**LLAMA, "text_config": None}, 2, 131_072),
        ({**LLAMA, "layer_types": ["full_attention"] * 32}, 2, 131_072),
    ],
)
def test_block_when_the_configuration_is_read_then_bytes_of_a_token(config, value_bytes, token_bytes):
    assert block_of(config, value_bytes=value_bytes, page_tokens=16).block_bytes == 16 * token_bytes


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"num_hidden_layers": None}, None),
        ({"num_attention_heads": 0}, "cannot be worked out"),
        ({"num_attention_heads": [8]}, "cannot be worked out"),
        ({"layer_types": 7}, "cannot be worked out"),
    ],
)
def test_block_when_the_model_keeps_something_else_or_says_too_little_then_refused(more, said):
    config = {key: value for key, value in {**LLAMA, **more}.items() if value is not None}
    with pytest.raises(ValueError, match=said or "num_hidden_layers"):
        block_of(config, value_bytes=2, page_tokens=16)


def test_block_when_index_keys_stand_beside_fp8_rows_then_it_is_said_that_this_is_not_known():
    with pytest.raises(ValueError, match="only bf16"):
        block_of({**DEEPSEEK, "index_head_dim": 128}, value_bytes=1, page_tokens=64)


def test_capacity_when_a_page_does_not_end_on_a_memory_page_then_its_frame_counts():
    block = block_of({**LLAMA, "head_dim": 1, "num_hidden_layers": 3}, value_bytes=2, page_tokens=16)
    assert (block.block_bytes, block.frame_bytes) == (1536, 4096)
    found = capacity(block, page_tokens=16, dram_bytes=8192, ssd_bytes=4095, rate=None, endurance_bytes=None)
    assert (found.dram_tokens, found.ssd_tokens, found.dram_hours) == (32, 0, None)


def test_size_when_all_is_told_then_hours_writes_and_years(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = "--dram 128 --ssd 1024 --rate 1000 --endurance 3600 --json".split()
    assert cli.main(["size", str(tmp_path), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dram_tokens"] == 1 << 20 and found["ssd_tokens"] == 8 << 20
    assert found["dram_hours"] == pytest.approx((1 << 20) / 3.6e6)
    assert found["ssd_bytes_per_day"] == pytest.approx(1000 * 86_400 * 131_072)
    assert found["ssd_years"] == pytest.approx(3600e12 / (1000 * 86_400 * 131_072) / 365.25)
    assert cli.main(["size", str(tmp_path / "config.json"), *words[:-1]]) == 0
    said = capsys.readouterr().out
    assert "DRAM: 1048576 tokens, 0.3 hours" in said and "years" in said


@pytest.mark.parametrize("word", ["--dram=1e300", "--ssd=1e300", "--rate=1e-320", "--endurance=inf", "--page-size=-1"])
def test_size_when_a_value_is_out_of_range_then_exit_2_and_which_may_be(word, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert cli.main(["size", str(tmp_path), "--dram=128", "--rate=1", "--json", word]) == 2
    assert "from 1e-06 to 1e+15" in capsys.readouterr().err
    extremes = ["--dram=1e15", "--ssd=1e15", "--rate=1e-6", "--endurance=1e15", "--json"]
    assert cli.main(["size", str(tmp_path), *extremes]) == 0
    assert "Infinity" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["missing"], [".", "--dram", "0"], [".", "--rate", "nan"]])
def test_size_when_it_cannot_be_told_then_exit_2_and_why(words, capsys):
    assert cli.main(["size", *words]) == 2
    assert capsys.readouterr().err.startswith("banyan size: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no such file"), ("[]", "no model's"), ("{", "Expecting"), ("{}", "--draft: config.json does not say")],
)
def test_size_when_the_drafts_configuration_is_broken_then_it_is_the_drafts_that_is_named(text, said, tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(LLAMA))
    if text is not None:
        (tmp_path / "draft.json").write_text(text)
    assert cli.main(["size", str(tmp_path / "model.json"), "--draft", str(tmp_path / "draft.json")]) == 2
    err = capsys.readouterr().err
    assert said in err and "model.json" not in err and "draft" in err


def test_size_when_the_system_does_not_look_for_such_a_folder_then_exit_2_and_why(tmp_path, capsys):
    # As below a folder that may not be entered; root may enter all.
    assert cli.main(["size", str(tmp_path / ("x" * 300))]) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_when_it_is_printed_then_it_knows_the_commands(shell, capsys, tmp_path):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("doctor", "route", "size", "--max-in-flight"):
        assert word in script
    if shell == "bash":
        (tmp_path / "banyan").write_text(
            f"{script}\nCOMP_WORDS=(banyan doc); COMP_CWORD=1; COMP_LINE='banyan doc'; COMP_POINT=10\n"
            "$(complete -p banyan | sed -E 's/.* -F ([^ ]+).*/\\1/'); echo \"${COMPREPLY[@]}\"\n"
        )
        done = subprocess.run(["bash", tmp_path / "banyan"], capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["doctor"], done.stderr


@pytest.mark.parametrize(
    ("draft", "token_bytes"),
    [
        ({**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 32}, 131_072 + 16_384),
        ({**LLAMA, "num_nextn_predict_layers": 2}, 131_072 + 8_192),
        ({"text_config": {**LLAMA, "num_nextn_predict_layers": 1}}, 131_072 + 4_096),
    ],
)
def test_block_when_a_draft_runs_beside_the_model_then_its_rows_lie_behind(draft, token_bytes):
    assert block_of(LLAMA, value_bytes=2, page_tokens=16, draft=draft).block_bytes == 16 * token_bytes


def test_model_when_its_name_is_no_folder_then_that_is_said(capsys):
    assert cli.main(["size", "org/model", "--dram", "1"]) == 2
    assert "name the model's folder" in capsys.readouterr().err
