"""Text on disk becomes sequences, whatever kind of file it is in and whoever tokenises it."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from isthmus.errors import DamagedError, StorageError, TaskError, UserError
from isthmus.task.packed_text import PackedText
from isthmus.task.packed_text.documents import MAX_DOCUMENT, FileSource
from isthmus.task.packed_text.token_files import BLOCK

END = 0
DOCUMENTS = [f"document {number}: " + "word " * (number % 7) for number in range(90)]
FORK = multiprocessing.get_context("fork")


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def packed(files: Any, **more: Any) -> PackedText:
    options = {"tokenizer": by_bytes, "end": END, "length": 16, "separator": "\n\n"}
    return PackedText(files, **{**options, **more})


def rows_of(documents: list[str], length: int) -> list[tuple[list[int], list[int]]]:
    """The rows by definition: all documents in one line, cut."""
    line = [number for text in documents if text for number in [*by_bytes(text), END]]
    return [
        (line[at : at + length], line[at + 1 : at + length + 1])
        for at in range(0, len(line) - length, length)
    ]


def listed(data: PackedText) -> list[tuple[list[int], list[int]]]:
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in data]


def json_lines(documents: list[str], key: str = "text") -> str:
    return "".join(json.dumps({key: text, "other": 1}) + "\n" for text in documents)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files whose documents are DOCUMENTS in order."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json_lines(DOCUMENTS[:20]) + "\n" + json_lines(["", "x"][:1]))
    (folder / "b.txt").write_text("\n\n".join(DOCUMENTS[20:50]))
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.write(json_lines(DOCUMENTS[50:]))
    (folder / "README.md").write_text("not a document")
    return folder


@pytest.mark.parametrize("length", [1, 7, 16, 1000])
def test_rows_are_those_of_one_line_of_all_documents(folder: Path, length: int) -> None:
    data = packed(folder, length=length)
    assert listed(data) == rows_of(DOCUMENTS, length)
    assert len(data) == (data.tokens - 1) // length
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_file_of_a_tokenizer_numbers_the_same_as_the_package(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<end>"], show_progress=False
    )
    trained.train_from_iterator(DOCUMENTS, trainer)
    # Texts are tokenised whole, whatever the file says for batches of a model.
    trained.enable_truncation(5)
    path = folder / "tokenizer.json"
    trained.save(str(path))
    trained.no_truncation()
    data = packed(folder, tokenizer=path, end="<end>", length=8)
    end = trained.token_to_id("<end>")
    line = [number for text in DOCUMENTS for number in [*trained.encode(text).ids, end]]
    assert [number for inputs, _ in data for number in inputs.tolist()] == line[: 8 * len(data)]
    assert packed(folder, tokenizer=str(path), end=end, length=8).digest == data.digest
    (folder / "half.jsonl").write_text('{"text": "\\ud800"}')
    with pytest.raises(TaskError, match=r"half\.jsonl: a text has half of a surrogate pair"):
        packed(folder / "half.jsonl", tokenizer=path, end="<end>")
    with pytest.raises(TaskError, match="has no token '<stop>' to end documents with"):
        packed(folder, tokenizer=path, end="<stop>")
    path.write_text("{}")
    with pytest.raises(TaskError, match=r"tokenizer\.json is no file of the package tokenizers"):
        packed(folder, tokenizer=path, end="<end>")


def test_tables_have_the_same_rows_as_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip(
        "pyarrow", reason="pyarrow is not installed; pip install 'isthmus[text]'"
    )
    from pyarrow import parquet

    documents: list[str | None] = [*DOCUMENTS, None, ""]
    table = pyarrow.table({"body": documents, "number": list(range(len(documents)))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    with pyarrow.ipc.new_file(tmp_path / "c.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        assert listed(packed(tmp_path / name, column="body")) == rows_of(DOCUMENTS, 16)
        with pytest.raises(TaskError, match=rf"{name} has no 'text', but 'body', 'number'; name"):
            packed(tmp_path / name)
        with pytest.raises(TaskError, match=rf"{name}: column 'number' has int64, and no text"):
            packed(tmp_path / name, column="number")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "short.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TaskError, match=r"short\.parquet cannot be read as parquet"):
        packed(tmp_path / "short.parquet", column="body")
    (tmp_path / "short.arrow").write_bytes((tmp_path / "c.arrow").read_bytes()[:500])
    with pytest.raises(TaskError, match=r"short\.arrow cannot be read as Arrow"):
        packed(tmp_path / "short.arrow", column="body")


def test_a_dataset_of_hugging_face_has_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed; pip install datasets"
    )
    dataset = datasets.Dataset.from_dict({"text": DOCUMENTS})
    data = packed(dataset, folder=tmp_path)
    assert listed(data) == rows_of(DOCUMENTS, 16)
    assert packed(dataset, folder=tmp_path).digest == data.digest
    assert packed(dataset.select(range(80)), folder=tmp_path).digest != data.digest
    with pytest.raises(TaskError, match="needs a folder for the tokens of a Dataset"):
        packed(dataset)
    with pytest.raises(TaskError, match="IterableDataset, which has no indices; give it files"):
        packed(dataset.to_iterable_dataset(), folder=tmp_path)
    with pytest.raises(TaskError, match="has no column 'body', but 'text'"):
        packed(dataset, folder=tmp_path, column="body")


def test_a_decoder_computes_for_documents_what_it_computes_for_each_alone(tmp_path: Path) -> None:
    """With `boundaries`, attention and positions of a document do not depend on those before."""
    transformers = pytest.importorskip("transformers")
    documents = ["abcdef", "gh", "ijklmno"]
    (tmp_path / "a.jsonl").write_text(json_lines(documents))
    data = packed(tmp_path, boundaries=True, length=17)
    (inputs, targets), *others = data
    assert not others
    line = [number for text in documents for number in [*by_bytes(text), END]]
    assert inputs["input_ids"].tolist() == line[:17]
    assert inputs["position_ids"].tolist() == [*range(7), *range(3), *range(7)]
    assert targets.tolist() == [*line[1:7], -100, *line[8:10], -100, *line[11:18]]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        batch = {name: each[None] for name, each in inputs.items()}
        together = model(**batch, use_cache=False).logits[0]
        for first, last in ((0, 7), (7, 10), (10, 17)):
            alone = model(inputs["input_ids"][None, first:last], use_cache=False).logits[0]
            torch.testing.assert_close(together[first:last], alone)


def test_parts_are_neighbouring_rows(folder: Path) -> None:
    data = packed(folder)
    held_out = data[:10]
    rest = data[10:]
    assert listed(held_out) + listed(rest) == listed(data)
    assert len({data.digest, held_out.digest, rest.digest}) == 3
    assert rest[5:].digest == data[15:].digest
    with pytest.raises(TaskError, match="neighbouring rows, so without a step"):
        data[::2]


def test_it_is_a_name_of_the_package() -> None:
    assert isthmus.PackedText is PackedText


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl has no text"),
        ("a.txt", b"", r"a\.txt has no text"),
        ("a.jsonl", b'{"text": ""}\n', r"a\.jsonl has no text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON: "),
        ("a.jsonl", b"[1]\n", r"a\.jsonl, line 1 is not a JSON object with a key 'text'"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1 has no 'text', but 'body'; name the column"),
        ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl, line 1: 'text' is int, and no text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1 is not UTF-8: invalid start byte"),
        ("a.txt", b"x" * 99 + b"\xe4", r"a\.txt is not UTF-8 near byte \d+: unexpected end of"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl: the tokenizer failed .* surrogates not"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", r"a\.jsonl\.gz is no whole gzip file"),
        ("a.txt.gz", b"text", r"a\.txt\.gz is no whole gzip file: Not a gzipped file"),
        ("a.txt", b"short", r"the text has 6 tokens, and a sequence of length=16 needs 17"),
        ("a.csv", b"text\nx\n", r"a\.csv is none of the files that text is read from: \.parquet, "),
    ],
)
def test_bad_files_are_one_sentence(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        packed(path)
    assert "\n" not in str(raised.value)
    drafts = list(tmp_path.glob(".tokens/*.draft"))
    assert not drafts


def test_bad_arguments_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no file .*none\.txt"):
        packed(tmp_path / "none.txt")
    with pytest.raises(TaskError, match=r"there is no file or folder of text .*/texts$"):
        packed(tmp_path / "texts")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TaskError, match=r"empty has no file with text: \.parquet, \.arrow, "):
        packed(empty)
    with pytest.raises(TaskError, match="an empty list of files"):
        packed([])
    with pytest.raises(TaskError, match="length=0 must be at least 1"):
        packed(folder, length=0)
    with pytest.raises(TaskError, match="separator is empty"):
        packed(folder, separator="")
    with pytest.raises(TaskError, match="end='<end>' of a function must be a token's number"):
        packed(folder, end="<end>")
    with pytest.raises(TaskError, match="end=-1 is no number of a token"):
        packed(folder, end=-1)
    with pytest.raises(TaskError, match="must return a list of numbers from 0 on"):
        packed(folder, tokenizer=lambda text: [-1])
    with pytest.raises(TaskError, match="must return a list of numbers from 0 on"):
        packed(folder, tokenizer=lambda text: text)
    with pytest.raises(TaskError, match="there is no tokenizer file"):
        packed(folder, tokenizer=tmp_path / "none.json", end="<end>")


def test_a_document_of_any_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The files have holes, and no memory for the text."""
    for name, message in (("a.txt", "give PackedText a separator"), ("a.jsonl", "line 1 has more")):
        with (tmp_path / name).open("wb") as file:
            file.truncate(4 * MAX_DOCUMENT)
        with pytest.raises(TaskError, match=message):
            packed(tmp_path / name, separator=None)


def test_a_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written to .*file.*: Not a directory; give"):
        packed(folder, folder=tmp_path / "file" / "tokens")


# -- the same text as before ----------------------------------------------------------------------


def test_text_that_has_changed_is_refused_and_a_copy_is_not(folder: Path) -> None:
    before = packed(folder)
    path = folder / "a.jsonl"
    content = path.read_text()
    path.write_text(content)
    os.utime(path, (1, 1))
    assert packed(folder).digest == before.digest
    path.write_text(content.replace("word", "WORD"))
    with pytest.raises(TaskError, match=r"a\.jsonl has changed since it was tokenised; restore it"):
        packed(folder)
    for tokens in folder.glob(".tokens/a.jsonl.*"):
        tokens.unlink()
    assert packed(folder).digest != before.digest


def test_a_file_that_changes_while_it_is_tokenised_is_refused(folder: Path) -> None:
    def changing(text: str) -> list[int]:
        with (folder / "a.jsonl").open("a") as file:
            file.write("\n")
        return by_bytes(text)

    with pytest.raises(TaskError, match=r"a\.jsonl has changed while it was tokenised"):
        packed(folder / "a.jsonl", tokenizer=changing)


def test_a_function_that_has_changed_is_refused(folder: Path) -> None:
    shift = 0

    def tokenizer(text: str) -> list[int]:
        return [number + shift * text.startswith("document") for number in text.encode()]

    packed(folder, tokenizer=tokenizer)
    shift = 1
    with pytest.raises(TaskError, match=r"the tokenizer has changed since .*a\.jsonl was token"):
        packed(folder, tokenizer=tokenizer)


def test_other_settings_have_their_own_tokens(folder: Path) -> None:
    first = packed(folder)
    second = packed(folder, end=1)
    assert first[0][0].tolist() != second[0][0].tolist() or first.digest != second.digest
    assert listed(packed(folder)) == rows_of(DOCUMENTS, 16)


@pytest.mark.parametrize("at", [0, BLOCK + 3, -1, -40])
def test_damage_is_noticed(at: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("many words " * 12_000)
    data = packed(tmp_path)
    assert data.tokens * 4 > 2 * BLOCK
    [tokens] = tmp_path.glob(".tokens/*")
    content = bytearray(tokens.read_bytes())
    content[at] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(DamagedError, match="is damaged; delete it, and the text is tokenised"):
        listed(packed(tmp_path))


def test_a_file_that_was_cut_is_noticed(folder: Path) -> None:
    data = packed(folder)
    for tokens in folder.glob(".tokens/b.txt.*"):
        os.truncate(tokens, 100)
    with pytest.raises(DamagedError, match=r"b\.txt\.\w+ is damaged"):
        listed(data)
    with pytest.raises(DamagedError, match=r"b\.txt\.\w+ is damaged"):
        packed(folder)


# -- processes ------------------------------------------------------------------------------------


def test_a_process_that_is_killed_leaves_nothing_in_the_way(folder: Path) -> None:
    inside = FORK.Event()

    def stuck(text: str) -> list[int]:
        if text == DOCUMENTS[30]:
            inside.set()
            signal.pause()
        return by_bytes(text)

    stuck.__qualname__ = by_bytes.__qualname__
    process = FORK.Process(target=packed, args=[folder], kwargs={"tokenizer": stuck})
    process.start()
    assert inside.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(folder.glob(".tokens/b.txt.*.draft"))
    assert listed(packed(folder)) == rows_of(DOCUMENTS, 16)
    assert not list(folder.glob(".tokens/*.draft"))


def test_processes_that_begin_together_share_the_work(folder: Path, tmp_path: Path) -> None:
    """Each document is tokenised by one of them, and all have the same rows."""
    log = tmp_path / "log"
    ready = FORK.Barrier(3)

    def counted(text: str) -> list[int]:
        if text.startswith("document"):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {text}\n")
            time.sleep(0.001)  # a slow tokenizer, so that the others take some of the files
        return by_bytes(text)

    def work(results: Any) -> None:
        ready.wait(60)
        results.put(listed(packed(folder, tokenizer=counted)))

    results = FORK.Queue()
    processes = [FORK.Process(target=work, args=[results]) for _ in range(3)]
    for process in processes:
        process.start()
    rows = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert rows == 3 * [rows_of(DOCUMENTS, 16)]
    lines = log.read_text().splitlines()
    texts = [line.partition(" ")[2] for line in lines]
    assert {text.strip() for text in texts} == {text.strip() for text in DOCUMENTS}
    # Besides, each compares the first document of files that another one has written.
    assert len(texts) <= len(DOCUMENTS) + 3 * 3


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 20_000}) + "\n"
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(2000):
            file.write(line)
    tracemalloc.start()
    try:
        data = packed(tmp_path, tokenizer=lambda text: 5000 * [7])
        assert data[len(data) - 1][0].tolist()[:3] == 3 * [7]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert data.tokens == 2000 * 5001
    assert peak < 4 << 20  # of 40 MB of text and 40 MB of tokens


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_tokens_are_for_those_who_can_read_the_text(tmp_path: Path, mode: int) -> None:
    text = tmp_path / "letters.txt"
    text.write_text("of a patient " * 9)
    text.chmod(mode)
    packed(text)
    [tokens] = (tmp_path / ".tokens").iterdir()
    assert tokens.stat().st_mode & 0o777 == mode


def test_tokens_of_another_group_than_the_text_are_not_for_that_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all users of a machine have one group, and the text belongs to a project's."""
    group = (folder / "b.txt").stat().st_gid
    monkeypatch.setattr(FileSource, "owner_and_readers", lambda _: (os.geteuid(), group + 1, 0o440))
    packed(folder)
    modes = {path.stat().st_mode & 0o777 for path in (folder / ".tokens").iterdir()}
    assert modes == {0o600}


def test_a_draft_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.write_text("precious")
    packed(folder)
    tokens = sorted((folder / ".tokens").iterdir())[0]
    tokens.unlink()
    tokens.with_name(f"{tokens.name}.draft").symlink_to(other)
    with pytest.raises(StorageError, match=r"cannot be written to .* give PackedText another"):
        packed(folder)
    assert other.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("when", ["found", "read", "draft"])
def test_tokens_of_another_user_are_not_used(folder: Path, when: str) -> None:
    data = packed(folder)
    tokens = sorted((folder / ".tokens").iterdir())[0]
    if when == "draft":
        tokens.unlink()
        tokens = tokens.with_name(f"{tokens.name}.draft")
        tokens.touch()
        tokens.chmod(0o666)
    os.chown(tokens, 65534, 65534)
    use = {"read": lambda: data[0]}.get(when, lambda: packed(folder))
    with pytest.raises(StorageError, match="belongs to user 65534, who is neither the owner of"):
        use()
    if when == "found":  # those who may write the text may write its tokens
        for path in folder.glob("*.*"):
            os.chown(path, 65534, 65534)
        assert listed(packed(folder)) == rows_of(DOCUMENTS, 16)


def test_text_of_a_table_that_is_not_utf_8_is_one_sentence(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    buffers = [None, pyarrow.py_buffer(struct.pack("<ii", 0, 2)), pyarrow.py_buffer(b"\xff\xfe")]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    pyarrow_parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(
        TaskError, match=r"a\.parquet has text that is not UTF-8: invalid start byte"
    ):
        packed(tmp_path)
