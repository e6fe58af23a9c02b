"""docs/security.md: each of its sentences has tests, and its table has the limits of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from PIL import Image

from megatron_hetero.base import files
from megatron_hetero.base.lock import Lock
from megatron_hetero.checkpoint import index as checkpoint_index
from megatron_hetero.config import load
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data import chat, item_fields, tokenizer
from megatron_hetero.data.records import Dataset
from megatron_hetero.data.sources import json_files, parquet_groups, patterns, tar_headers
from megatron_hetero.hf import model_files, peft_folders
from megatron_hetero.models.items import video_files

UNIT = Path(__file__).parent
PAGE = (UNIT.parents[1] / "docs/security.md").read_text(encoding="utf-8")

TESTS = {
    "Weights and checkpoints are": "hf/test_hf_folder::test_missing_weights",
    "Remote code": "data/test_processing::test_files_that_do_not_belong_together_are_named",
    "Chat templates run": "data/test_processing::test_unfit_chat_templates_are_named",
    "YAML builds": "config/test_config::test_what_is_wrong_in_a_file data/test_energon::test_broken_folders",
    "Pillow decodes": "models/test_pictures::test_no_program_is_started_for_a_picture",
    "FFmpeg gets": "models/test_video_files::test_nothing_but_the_file_is_opened",
    "Absolute image paths": "data/test_records::test_malformed_records_are_named "
    "data/test_records::test_links_must_not_leave_the_image_folder data/test_tars::test_bad_files "
    "models/test_pictures::test_missing_files_are_named_and_nothing_waits_on_a_pipe",
    "The same holds for Energon": "data/test_energon::test_links_out_of_a_folder_are_refused "
    "data/test_energon::test_names_reach_nothing data/test_inspect::test_names_of_a_folder_reach_no_host_or_file",
    "Python files in them": "data/test_energon::test_bad_mappings",
    "What you name by": "test_security::test_files_that_a_user_names_may_be_links",
    "Links that leave a model folder": "hf/test_links::test_a_link_out_of_a_model_folder "
    "hf/test_links::test_a_snapshot_of_a_cache_is_read hf/test_links::test_what_is_no_blob_of_the_cache",
    "The base that a PEFT": "models/test_adapter_folders::test_the_base_that_an_adapter_names_is_not_opened",
    "**Nothing is downloaded**": "data/test_sources::test_other_urls_reach_no_file_system "
    "data/test_sources::test_braces_hide_no_url",
    "A data set's own files": "data/test_energon::test_names_reach_nothing "
    "data/test_keys::test_who_follows_the_advice_can_train",
    "**No index of another user": "data/test_index::test_an_index_that_is_not_our_own_is_not_used "
    "data/test_index::test_an_index_of_the_owner_of_its_folder_is_used "
    "data/test_index::test_users_of_a_shared_folder_have_indexes_of_their_own",
    "An index gives places": "data/test_index::test_an_index_reads_the_files_that_were_asked_for "
    "data/test_index::test_figures_that_do_not_fit_are_not_used",
    "Exports replace only": "hf/test_folder_writer::test_what_has_no_mark_of_ours_is_not_replaced "
    "train/test_log_folder::test_an_earlier_run_is_kept",
    "In a folder that a stranger": "base/test_own_files::test_a_lock_takes_no_file_of_others "
    "base/test_own_files::test_a_pointer_of_others_is_moved base/test_own_files::test_a_log_folder_with_links "
    "hf/test_folder_writer::test_an_export_removes_no_folder_of_others",
    "The folder itself": "test_security::test_a_folder_that_a_user_names_may_be_a_link",
    "An export counts": "hf/test_folder_writer::test_a_copy_of_an_export_is_not_replaced",
    "What a killed export left": "hf/test_folder_writer::test_what_a_killed_export_left_is_removed",
    "Checkpoints are removed": "base/test_own_files::test_a_checkpoint_with_files_of_others_stays",
    "In `data.index` and": "data/test_index::test_an_index_is_computed_once_and_anew_if_its_file_changes "
    "models/test_video_files::test_stored_tables_take_few_bytes_and_have_a_limit",
    "Missing, unexpected": "hf/test_hf_folder::test_faults_are_counted_and_listed "
    "models/test_pictures::test_pictures_that_are_cut_off_are_refused "
    "../functional/checkpoint/test_damage::test_damage_is_reported_by_name",
    "With `data.bad_records": "data/test_bad_records::test_training_goes_on_as_without_them "
    "data/test_bad_records::test_too_many_stop_all_ranks_with_one_message",
}
"""Tests by the words with which a sentence of "What never happens" begins."""

LIMITS = [
    ("the text of a record", json_files.MAX_TEXT_BYTES, "8 MiB"),
    ("a row group", parquet_groups.MAX_GROUP_BYTES, "4 GiB"),
    ("a row group", parquet_groups.MAX_GROUP_ROWS, "16,777,216 rows"),
    ("a name in a tar", tar_headers._MAX_NAME, "4,096 bytes"),
    ("a conversation", chat.MAX_TURNS, "512 turns"),
    ("a picture in a data URI", item_fields.MAX_DATA_BYTES, "4 MiB"),
    ("an image or a frame", 2 * (Image.MAX_IMAGE_PIXELS or 0), "178,956,970"),
    ("an image or a frame", video_files.MAX_PIXELS, "178,956,970"),
    ("a video", video_files.MAX_FRAMES, "8,388,608"),
    ("the names", patterns.MAX_FILES, "1,000,000, of"),
    ("the names", patterns.MAX_NAME, "4,096 characters"),
    ("the names", patterns.MAX_CHARACTERS, "2²⁸"),
    ("the names", patterns.MAX_BRACES, "16 braces"),
    ("a chat template", tokenizer.MAX_TEMPLATE, "2¹⁸ characters"),
    ("a tokenizer", tokenizer.MAX_TOKENIZER_BYTES, "64 MiB"),
    ("a tokenizer", model_files._MAX_INDEX_BYTES, "64 MiB"),
    ("other JSON files", files.MAX_JSON_BYTES, "4 MiB"),
    ("`metrics.jsonl`", files.MAX_OWN_BYTES, "1 GiB"),
    ("any other file", files.MAX_BYTES, "128 MiB"),
    ("patterns of ranks", peft_folders.MAX_PATTERNS, "4,096 of"),
    ("patterns of ranks", peft_folders.MAX_CHARACTERS, "256 characters"),
    ("a YAML configuration", load.MAX_BYTES, "1 MiB"),
    ("the index of a checkpoint", checkpoint_index._MAX_BYTES, "1 GiB"),
]
"""The words with which a row of "What is refused by size" begins, a limit in it, and how it is written there."""

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def _section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def _sentences() -> list[str]:
    """The sentences of the items; a heading in bold type that says nothing by itself belongs to the next one."""
    items = [" ".join(item.split()) for item in re.split(r"^- ", _section("What never happens"), flags=re.MULTILINE)]
    parts = [part for item in items for part in re.split(r"(?<=\.)\s+(?=[A-Z])|(?<=\.\*\*)\s+", item) if part]
    return [part for part in parts if not part.endswith(".**")]


def _value(text: str) -> int:
    number, _, unit = text.replace(",", "").partition(" ")
    power = number[1:].translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))
    if number[1:] != power:
        return 1 << int(power)
    return int(number) * UNITS.get(unit, 1)


def test_every_sentence_has_tests() -> None:
    sentences = _sentences()
    for sentence in sentences:
        assert sum(sentence.startswith(begin) for begin in TESTS) == 1, sentence
    for begin, tests in TESTS.items():
        assert any(sentence.startswith(begin) for sentence in sentences), begin
        for test in tests.split():
            file, _, name = test.partition("::")
            assert f"\ndef {name}(" in (UNIT / f"{file}.py").read_text(encoding="utf-8"), test


def test_the_limits_are_those_of_the_code() -> None:
    rows = [line.strip("| ") for line in _section("What is refused by size").splitlines() if line.startswith("| ")]
    for begin, value, text in LIMITS:
        [row] = [row for row in rows if row.startswith(begin)]
        assert text in row and _value(text.rstrip(", of")) == value, (begin, row)
    others = [row for row in rows if not row.startswith(tuple(begin for begin, *_ in LIMITS))]
    assert [row.partition(" |")[0] for row in others] == ["what"]


def test_files_that_a_user_names_may_be_links(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "there.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "link.jsonl").symlink_to("there.jsonl")
    for entry in (
        DatasetConfig(files=Pattern(f"{tmp_path}/link.jsonl")),
        DatasetConfig(annotations=tmp_path / "link.jsonl"),
    ):
        assert len(Dataset("d", entry)) == 1


def test_a_folder_that_a_user_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    Lock.take(tmp_path / "link/.lock", "link", "run", mixed="lines", fix="wait").release()
    with files.replacing(tmp_path / "link/plot.png") as new:
        new.write_text("a")
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [".lock", "plot.png"]
