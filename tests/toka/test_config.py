"""Settings: where they come from, what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka.config import Config, arguments, help_text, load, settings


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path):
    path = tmp_path / "toka.yaml"
    path.write_text("port: 1\nmax_seqs: 2\ndtype: float32\nprefix_cache: false\n")
    config = load([f"config={path}", "port=3"], environ={"TOKA_PORT": "4", "TOKA_MAX_SEQS": "5"})
    assert (config.port, config.max_seqs, config.dtype, config.prefix_cache) == (3, 5, "float32", False)
    assert config.page_size == Config().page_size


@pytest.mark.parametrize("args", [["port=8000"], ["--port=8000"], ["--port", "8000"]])
def test_spellings(args: list[str]):
    assert load(args, environ={}).port == 8000


def test_dashes_stand_for_underscores():
    assert load(["--max-seqs", "4"], environ={}).max_seqs == 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["prot=1"], "unknown setting 'prot'; did you mean 'port'?"),
        (["xyzzy=1"], "unknown setting 'xyzzy'"),
        (["port=many"], "port: expected a whole number, got 'many'"),
        (["port=70000"], "port: expected from 0 to 65535, got 70000"),
        (["page_size=0"], "page_size: expected from 1 to 1024"),
        (["prefix_cache=maybe"], "prefix_cache: expected true or false"),
        (["dtype=int8"], "dtype: expected one of auto, float32, bfloat16, float16, got 'int8'"),
        (["shutdown_timeout=nan"], "shutdown_timeout: expected at least 0"),
        (["8000"], "expected key=value"),
        (["--port"], "expected key=value"),
        (["config=/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(args: list[str], said: str):
    with pytest.raises(ValueError) as error:
        load(args, environ={})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_value_in_the_environment_or_file_names_its_place(tmp_path: Path):
    with pytest.raises(ValueError, match="TOKA_PORT: expected a whole number"):
        load([], environ={"TOKA_PORT": "x"})
    path = tmp_path / "c.yaml"
    path.write_text("prot: 1")
    with pytest.raises(ValueError, match="did you mean 'port'"):
        load([f"config={path}"], environ={})
    path.write_text("- port")
    with pytest.raises(ValueError, match="not a mapping"):
        load([f"config={path}"], environ={})


def test_a_part_takes_its_own_settings_alone():
    assert "queue_bytes" in settings("broker") and "port" not in settings("broker")
    with pytest.raises(ValueError, match="unknown setting 'port'"):
        load(["port=1"], "broker", environ={})
    assert load([], "broker", environ={"TOKA_PORT": "not for the broker"}) == Config()


@given(
    st.builds(
        Config,
        port=st.integers(0, 65535),
        model=st.text(st.characters(exclude_categories=["C", "Z"])),
        prefix_cache=st.booleans(),
        shutdown_timeout=st.floats(0, 1e6),
        queue_bytes=st.integers(1, 1 << 50),
    )
)
def test_arguments_carry_a_config_to_the_parts(config: Config):
    for part in ("frontend", "broker", "worker"):
        carried = load(arguments(config, part), part, environ={})
        assert all(getattr(carried, name) == getattr(config, name) for name in settings(part))


def test_help_shows_every_setting_with_its_default():
    text = help_text("toka", "serves")
    assert all(f"\n  {name}=" in text for name in settings())
    assert "port=int" in text and "[10210]" in text and "auto|float32|bfloat16" in text
    assert "port=" not in help_text("toka-broker", "queues", "broker")
