"""Where a run has seen a text: searches at any alignment, the inverse of every order, and recorded
runs with folders, rollbacks, ranks and branches, compared with reading all steps."""

import itertools
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import module_text, write_shards
from runs import (
    all_rows,
    change,
    edit_rows,
    said,
    training_config,
)

import gpt2_ddp
from gpt2_ddp.config.tools import WhereConfig
from gpt2_ddp.data.corpus import open_corpus
from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.mixture import MixedOrder, Phase, normalized, single_folder
from gpt2_ddp.data.order import Order, Permutation
from gpt2_ddp.data.search import TextSearch
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.remote.copies import with_local_runs
from gpt2_ddp.reports.positions import History
from gpt2_ddp.reports.where import (
    Answer,
    PastStep,
    Place,
    answer_question,
    describe,
    find,
    open_run,
    spikes,
    texts_of,
)
from gpt2_ddp.tasks.pretraining import Pretraining

SIZE = 32  # tokens of a window, of `training_config`


class Tokens:
    """A stream in memory."""

    def __init__(self, tokens):
        self.tokens = np.array(tokens, np.uint16)

    def __len__(self):
        return len(self.tokens)

    def read(self, starts, length):
        return np.stack([self.tokens[start : start + length] for start in starts])


def every_occurrence(text, tokens, byte_of):
    """First and last token, and the offset in the first, by looking at the bytes of each document:
    `byte_of` has the bytes of each id, None for a special token."""
    found = []
    begin = 0
    for is_special, group in itertools.groupby(tokens, key=lambda token: byte_of[token] is None):
        ids = [*group]
        if not is_special:
            owners = [at for at, token in enumerate(ids, begin) for _ in byte_of[token]]
            whole = b"".join(byte_of[token] for token in ids)
            place = whole.find(text)
            while place >= 0:
                first = owners[place]
                offset = place - owners.index(first)
                found.append((first, owners[place + len(text) - 1], offset))
                place = whole.find(text, place + 1)
        begin += len(ids)
    return found


def searched(search, stream, block=7):
    """All occurrences, in blocks of so many tokens."""
    anchor = search.anchor(stream)
    found = []
    for start in range(0, len(stream), block):
        part = search.find(stream, anchor, range(start, min(start + block, len(stream))))
        found += zip(part.first.tolist(), part.last.tolist(), part.offsets.tolist(), strict=True)
    return found


def test_a_text_is_found_however_it_was_cut_into_tokens():
    rng = random.Random(0)
    words = ["a", "b", "aa", "ab", "ba", "aba", "bab", "abab", "aabb", "bbbbb"]
    tokens = {word.encode(): number for number, word in enumerate(words)}
    byte_of = [*tokens, None]
    for _ in range(200):
        stream = Tokens([rng.randrange(len(byte_of)) for _ in range(rng.randint(1, 60))])
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 12))).encode()
        search = TextSearch(text, tokens, len(byte_of))
        expected = every_occurrence(text, stream.tokens.tolist(), byte_of)
        assert searched(search, stream, rng.randint(1, 9)) == expected, (text, stream.tokens)


@pytest.mark.parametrize("text", ["é", "字", "rn", "return", " self.", "\n\n    def ", "x" * 300])
def test_parts_of_real_text_are_found(corpus, text):
    tokenizer = load_tokenizer(str(corpus / "tokenizer.json"))
    stream = TokenStream(corpus, read_manifest(corpus), "train")
    tokens = stream.read(np.array([0]), 6000)[0].tolist()
    byte_of = {number: token for token, number in tokenizer.tokens.items()}
    byte_of |= dict.fromkeys(tokenizer.specials.values())
    search = TextSearch(text.encode(), tokenizer.tokens, tokenizer.vocab_size)
    expected = every_occurrence(text.encode(), tokens, byte_of)
    assert searched(search, Tokens(tokens), 1000) == expected


def test_a_text_as_long_as_a_document_is_found(corpus):
    text = module_text("bisect").encode()
    tokenizer = load_tokenizer(str(corpus / "tokenizer.json"))
    stream = TokenStream(corpus, read_manifest(corpus), "train")
    search = TextSearch(text, tokenizer.tokens, tokenizer.vocab_size)
    ((first, last, offset),) = searched(search, stream, 1 << 20)
    (tokens,) = stream.read(np.array([first]), last + 1 - first)
    assert (tokenizer.decode_bytes(tokens), offset) == (text, 0)


def assert_inverted(order, items, end):
    assert_equal(order.uses_of(items, end), Order.uses_of(order, items, end))


def assert_equal(uses, others):
    assert uses.positions.tolist() == others.positions.tolist()
    assert uses.items.tolist() == others.items.tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 10, 997, 1024])
@pytest.mark.parametrize("shifts", [1, 32])
def test_an_order_is_inverted(n, shifts):
    order = Permutation(1337, n, shifts=shifts)
    items = np.arange(0, n * shifts, max(n * shifts // 40, 1), dtype=np.uint64)
    for end in (0, 1, n, 3 * n + n // 2):
        assert_inverted(order, items, end)
        assert_equal(order.uses_of(items, end)._replace(), Order.uses_of(order, items, end))
    far = np.array([10**12 - 5, 7 * 10**12])
    large = Permutation(3, 10**12 + 7)
    assert {*far.tolist()} <= {*large.uses_of(large.items_at(far), 8 * 10**12).positions.tolist()}


@pytest.mark.parametrize("shifts", [1, 32])
def test_a_mixture_is_inverted(shifts):
    windows = [997, 300, 50]
    phases = [
        Phase(0, normalized([0.7, 0.2, 0])),
        Phase(3000, normalized([0, 0.5, 0.5])),
        Phase(5000, normalized([0.3, 1, 1e-4])),
    ]
    order = MixedOrder(1337, windows, phases, ["a", "b", "c"], shifts)
    items = [
        (source << 48) + item
        for source, n in enumerate(windows)
        for item in range(0, n * shifts, max(n * shifts // 9, 1))
    ]
    for end in (0, 999, 3000, 8001):
        assert_inverted(order, np.array(items, np.uint64), end)


@pytest.mark.parametrize("shifts", [1, 5, 32])
def test_items_with_a_span_are_those_that_hold_one_of_its_tokens(shifts):
    windows = Windows(Tokens(np.zeros(400)), SIZE, shifts)
    starts = windows.starts(np.arange(len(windows) * shifts))
    for first, last in [(0, 0), (31, 33), (32, 32), (64, 200), (390, 399), (399, 399)]:
        holds = (starts <= last) & (starts + SIZE >= first)
        items = windows.items_with(np.array([first, 0]), np.array([last, 0]))
        assert items.tolist() == np.flatnonzero(holds | (starts == 0)).tolist()


class Recorder:
    """Writes the rows of a run that takes its steps from a real feed, without a model; and notes
    what each rank read."""

    def __init__(self, config, folder):
        self.config = config
        self.run = folder / config.run_name
        self.run.mkdir(parents=True)
        self.corpus = open_corpus(config)
        order = Pretraining(config).make_order(self.corpus.sources)
        self.feed = Feed(order, GlobalBatch(config.global_batch_windows, lambda n: []))
        self.step = 0
        self.rows = []
        self.reads = []  # (step, rank, micro-batch, row, item) in the order of reading
        self.states = {0: self.feed.state}
        self.contents = {}

    def start(self, processes, micro_batch, **more):
        self.layout = processes, micro_batch
        corpus = self.corpus
        mixture = corpus.mixture or single_folder(corpus.manifests[0].hash)
        self.rows.append(
            {"event": "start", "kind": "gpt2", "step": self.step, "processes": processes}
            | {"micro_batch": micro_batch, "config": self.config.model_dump(mode="json")}
            | {"mixture": mixture.model_dump(mode="json")}
            | more
        )

    def train(self, steps):
        for _ in range(steps):
            items = self.feed.next_step().items
            self.step += 1
            for m, ranks in enumerate(interleaved(*self.layout, len(items))):
                for rank, share in enumerate(ranks):
                    for row, place in enumerate(share):
                        self.reads.append((self.step, rank, m, row, int(items[place])))
            norm = 9.0 if self.step == 13 else 1.0
            self.rows.append({"step": self.step, "grad_norm": norm, "loss": 3.0})
            # of a checkpoint that no rollback saves again
            self.states.setdefault(self.step, self.feed.state)

    def roll_back(self, step):
        end = self.feed.state.position
        undone_at = self.step
        self.feed.seek(self.states[step])
        begin = self.feed.next_position
        self.feed.skip_range(begin, end)
        self.reads = [read for read in self.reads if read[0] <= step]
        self.states = {at: state for at, state in self.states.items() if at <= step}
        self.step = step
        event = {"event": "rollback", "step": step, "from": undone_at}
        self.rows.append(event | {"skipped_range": [begin, end]})

    def write(self):
        (self.run / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in self.rows))
        edit_rows(self.run, lambda rows: None)
        return self.run

    def expected(self, text):
        """Reads (step, rank, micro-batch, row) of the windows with the whole text, by decoding all
        that was read."""
        return sorted(
            (step, rank, m, row)
            for step, rank, m, row, item in self.reads
            if any(text in part for part in self.content(item))
        )

    def content(self, item):
        """The bytes of a window, of each document in it."""
        if item not in self.contents:
            eot = self.corpus.tokenizer.eot
            decode = self.corpus.tokenizer.decode_bytes
            source, own = divmod(item, 2**48)
            windows = self.corpus.sources[source]
            (tokens,) = windows.stream.read(windows.starts(np.array([own])), SIZE + 1)
            parts = np.split(tokens, np.flatnonzero(tokens == eot))
            self.contents[item] = [decode(part[part != eot]) for part in parts]
        return self.contents[item]


@pytest.fixture
def two_folders(corpus, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        shutil.copy(corpus / "tokenizer.json", folder)
        names = ["bisect", "heapq"] if number else ["abc", "keyword", "sched"]
        texts = [module_text(name) for name in names]
        write_shards(folder, "text", {"train": texts, "val": [module_text("queue")[:3000]]})
    return [str(folder) for folder in folders]


def mixed_run(folders, tmp_path, **changes):
    """Two folders, three layouts, two rollbacks to one checkpoint, and one to before a start."""
    config = training_config(
        folders[0],
        tmp_path / "runs",
        {"data.path": folders, "data.weights": [1, 2], "train.global_batch_tokens": 12 * SIZE}
        | changes,
    )
    recorder = Recorder(config, tmp_path / "runs")
    recorder.start(1, 3)
    recorder.train(20)
    recorder.start(2, 3)
    recorder.train(10)
    recorder.roll_back(20)
    recorder.train(4)
    recorder.roll_back(20)
    recorder.train(15)
    recorder.start(5, 1)
    recorder.train(45)
    recorder.roll_back(33)  # before the newest start
    recorder.train(25)
    recorder.write()
    return recorder


def random_texts(recorder, n, rng):
    """Texts of four lengths, from any byte of a document."""
    whole = [module_text(name) for name in ("abc", "keyword", "sched", "bisect", "heapq")]
    for number in range(n):
        text = rng.choice(whole)
        size = (4, 12, 40, 150)[number % 4]
        begin = rng.randrange(len(text) - size)
        yield text[begin : begin + size]


def assert_as_read(recorder, n):
    run = open_run(recorder.run, (), False)
    rng = random.Random(n)
    n_steps = 0
    for text in random_texts(recorder, n, rng):
        answer = find(run, text)
        uses = (use for use in answer.uses if use.times)
        found = sorted((use.step, use.rank, use.micro_batch, use.row) for use in uses)
        assert found == recorder.expected(text.encode()), text
        n_steps += len(found)
    assert n_steps > n, "the texts were trained on"


@pytest.mark.parametrize("shift", [False, True])
def test_answers_are_those_of_reading_all_steps(two_folders, tmp_path, shift):
    recorder = mixed_run(two_folders, tmp_path, **{"data.shift_windows": shift})
    assert_as_read(recorder, 12)


@pytest.mark.slow
def test_a_thousand_answers_are_those_of_reading_all_steps(two_folders, tmp_path):
    assert_as_read(mixed_run(two_folders, tmp_path), 1000)


def ask(run, **question):
    """Exit code, standard output and stderr of where.py."""
    return said(answer_question, WhereConfig.model_validate({"run": str(run)} | question))


def recorded(corpus, tmp_path, steps=6, **changes):
    """A run of one folder whose steps have two windows."""
    changes = {"train.global_batch_tokens": 2 * SIZE} | changes
    recorder = Recorder(training_config(corpus, tmp_path / "runs", changes), tmp_path / "runs")
    recorder.start(2, 1)
    recorder.train(steps)
    recorder.write()
    return recorder


def texts(recorder, item):
    """The longest part of a document in a window."""
    return max(recorder.content(item), key=len).decode()


def test_an_answer_begins_with_the_steps(corpus, tmp_path):
    recorder = recorded(corpus, tmp_path)
    step, _, m, row, item = recorder.reads[7]
    text = texts(recorder, item)
    code, out, _ = ask(recorder.run, text=text)
    lines = out.splitlines()
    assert (code, lines[0]) == (0, f"step {step}")
    assert lines[1].startswith("exposures: 1 to the whole text")
    assert any(line.split()[:5] == [str(step), "1", "1", str(m), str(row)] for line in lines)
    code, out, _ = ask(recorder.run, text=text, json=True)
    answer = json.loads(out)
    assert (answer["answer"], answer["steps"], answer["reached"]) == (f"step {step}", [step], 6)
    assert [use["rank"] for use in answer["uses"] if use["times"]] == [1]
    assert answer["exposures"] == 1
    parts = [use for use in answer["uses"] if not use["times"]]
    assert answer["part_exposures"] == len(parts)
    assert lines[1].endswith(f", {len(parts)} to a part of it") is bool(parts)
    assert gpt2_ddp.where(recorder.run, text).as_json() == answer
    file = tmp_path / "text.txt"
    file.write_text(f"{text}\n")
    assert json.loads(ask(recorder.run, file=str(file), json=True)[1]) == answer


def test_a_text_that_no_step_has_trained_on(corpus, tmp_path):
    recorder = recorded(corpus, tmp_path)
    reached = {read[-1] for read in recorder.reads}
    neighbours = {item + side for item in reached for side in (-1, 1)}
    item = next(item for item in range(1000) if item not in reached | neighbours)
    assert ask(recorder.run, text=texts(recorder, item))[1].splitlines()[0] == (
        "in the data, not reached by step 6"
    )
    assert ask(recorder.run, text="no such text")[1] == "not in this data\n"
    only_validation = module_text("token")[-200:]
    assert ask(recorder.run, text=only_validation)[1].splitlines()[0] == (
        f"in the validation split of {corpus}, which is never trained on"
    )


def small_folder(corpus, folder):
    """A folder of one short document, of which a step of two windows reads a large part."""
    folder.mkdir()
    shutil.copy(corpus / "tokenizer.json", folder)
    write_shards(folder, "text", {"train": [module_text("keyword")]})
    return folder


@pytest.mark.parametrize("shift", [False, True])
def test_text_that_each_pass_has_left_out(corpus, tmp_path, shift):
    """The first tokens, by shifted windows; the last ones, which fill no window."""
    folder = small_folder(corpus, tmp_path / "small")
    stream = TokenStream(folder, read_manifest(folder), "train")
    windows = len(stream) // SIZE
    changes = {"data.shift_windows": shift, "data.path": str(folder)}
    recorder = recorded(folder, tmp_path, steps=windows + 2, **changes)
    assert recorder.feed.state.position // len(recorder.corpus.sources[0]) == 2
    run = open_run(recorder.run, (), False)
    (whole,) = stream.read(np.array([0]), len(stream))
    trained = {token for read in recorder.reads for token in tokens_of(recorder, read[-1])}
    left_out = [token for token in range(1, len(stream)) if token not in trained]
    assert left_out[0] == 1 if shift else left_out[0] > SIZE
    ends = []
    for begin, end in runs_of(left_out):
        text = recorder.corpus.tokenizer.decode(whole[begin:end])
        place = next(p for p in find(run, text).places if (p.first, p.last) == (begin, end - 1))
        ends.append((begin, place.why))
    reasons = dict(ends)
    if shift:
        expected = f"but each of the 2 passes over {folder} left these tokens out: with"
        assert reasons[1].startswith(expected)
        text = recorder.corpus.tokenizer.decode(whole[1 : left_out[2]])
    else:
        expected = "but in no window: the folder's last tokens, which fill no window, are left out"
        assert [*reasons.values()] == [expected]
        (begin,) = reasons
        text = recorder.corpus.tokenizer.decode(whole[begin:])
    assert ask(recorder.run, text=text)[1].splitlines()[0].startswith(f"in the data, {expected}")


def test_passes_that_left_a_text_out_are_said(corpus, tmp_path):
    """And the steps that have only its end, as their pass begins inside of it."""
    folder = small_folder(corpus, tmp_path / "small")
    stream = TokenStream(folder, read_manifest(folder), "train")
    changes = {"data.shift_windows": True, "data.path": str(folder)}
    recorder = recorded(folder, tmp_path, steps=4 * (len(stream) // SIZE), **changes)
    source = recorder.corpus.sources[0]
    n = len(source)
    run = open_run(recorder.run, (), False)
    passes = recorder.feed.state.position // n
    items = [run.order.items_at(np.arange(n * each, n * each + n)) for each in range(passes)]
    begins = [int(source.starts(of_pass.astype(np.int64)).min()) for of_pass in items]
    last = sorted({*begins})[-2]  # all passes have a part of the tokens up to it, but one
    (tokens,) = stream.read(np.array([0]), last + 1)
    text = recorder.corpus.tokenizer.decode(tokens[1:])
    answer = find(run, text)
    (place,) = answer.places
    assert (place.first, place.last) == (1, last)
    left_out = [number for number, begin in enumerate(begins, 1) if begin > last]
    cut = [number for number, begin in enumerate(begins, 1) if 1 < begin <= last]
    assert answer.left_out == {str(folder): left_out}
    assert {use.epoch for use in answer.uses if use.rest_left_out} >= {*cut}
    assert not any(use.rest_left_out and begins[use.epoch - 1] <= 1 for use in answer.uses[:-1])
    out = ask(recorder.run, text=text)[1]
    names = "epoch" if len(left_out) == 1 else "epochs"
    assert f"\n{names} {', '.join(map(str, left_out))} of {folder} left it out: data.shift" in out
    assert "only a part of it, the rest is in no window of that pass: step" in out
    assert "at the border of two windows" not in out


def test_places_that_were_not_seen_are_counted():
    whys = ["", "but in no window", ""]
    places = [Place("data", "train", n, n + 1, not why, why) for n, why in enumerate(whys)]
    lines = describe(Answer(6, places, [], [], [], {})).splitlines()
    assert lines[1:] == ["data (train): 3 times", "  1 of them: in no window"]


def test_a_backslash_is_no_line_break(corpus, tmp_path):
    recorder = recorded(corpus, tmp_path)
    _, out, errors = ask(recorder.run, text=r"no such\ntext")
    assert out == "not in this data\n"
    assert errors.splitlines()[-1].startswith("note: the text has a backslash and an n, no line")


def tokens_of(recorder, item):
    """The positions of a window's tokens."""
    windows = recorder.corpus.sources[0]
    (begin,) = windows.starts(np.array([item]))
    return range(begin, begin + SIZE + 1)


def runs_of(numbers):
    """The ranges (first, after the last) of ascending numbers."""
    breaks = [n for n in range(1, len(numbers)) if numbers[n] != numbers[n - 1] + 1]
    for begin, end in itertools.pairwise([0, *breaks, len(numbers)]):
        yield numbers[begin], numbers[end - 1] + 1


def test_a_run_and_data_at_urls(corpus, tmp_path, monkeypatch, capsys):
    """The command gets copies, of a run its records alone; the Python function, and `--data`, too.
    The answer names the URLs."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    recorder = recorded(corpus, tmp_path)
    text = texts(recorder, recorder.reads[7][-1])
    answer = f"step {recorder.reads[7][0]}\n"
    question = {"run": f"file://{recorder.run}", "text": text}
    for name in ("step-00000002", "step-00000004"):  # as a bucket has them
        (recorder.run / name).mkdir()
        (recorder.run / name / "manifest.json").write_text('{"files": {}}')
    config = with_local_runs(WhereConfig.model_validate(question))
    assert said(answer_question, config)[1].startswith(answer)
    assert not [*Path(config.run).rglob("step-*")]
    url = f"file://{corpus}"
    said_of_url = ask(recorder.run, text=text, data=[url])[1]
    assert said_of_url.startswith(answer)
    assert f"{url} (train): once" in said_of_url
    assert f"{tmp_path}/cache" not in said_of_url
    recorder.rows[0]["config"]["data"]["path"] = [url]
    recorder.write()
    assert ask(recorder.run, text=text)[1].startswith(answer)
    nothing = f"file://{tmp_path}/nothing"
    with pytest.raises(UserError, match=r"data.path = file.*cannot be used"):
        ask(recorder.run, text=text, data=[nothing])
    with pytest.raises(UserError, match="without credentials"):
        ask(recorder.run, text=text, data=["s3://key:secret@bucket/data"])
    recorder.rows[0]["code"] = {"name": "mine.py:Mine", "sha256": "0" * 64}
    recorder.write()
    config = with_local_runs(WhereConfig.model_validate(question))
    assert [path.name for path in Path(config.run).rglob("step-*")] == ["step-00000004"]
    with pytest.raises(UserError, match=rf"task = file://{recorder.run}: the order of its data"):
        answer_question(config)


def test_what_a_rollback_undid_was_never_trained_on(corpus, tmp_path):
    recorder = recorded(corpus, tmp_path)
    (_, rank, m, row, item) = recorder.reads[-1]
    recorder.roll_back(4)
    recorder.train(2)
    recorder.write()
    answer = gpt2_ddp.where(recorder.run, texts(recorder, item))
    assert answer.text == "in the data, but never trained on: a rollback has undone step 6"
    assert [place.why for place in answer.places] == [
        "but a rollback has undone the step that trained on it"
    ]
    (use,) = (use for use in answer.undone if use.times)
    assert (use.rank, use.micro_batch, use.row, use.undone_at) == (rank, m, row, 4)


def test_a_text_that_the_border_of_two_windows_cuts(corpus, tmp_path):
    recorder = recorded(corpus, tmp_path)
    (step, *_, item) = recorder.reads[0]
    windows = recorder.corpus.sources[0]
    tokens = windows.stream.read(np.array([(item + 1) * SIZE - 3]), 10)[0]
    text = recorder.corpus.tokenizer.decode(tokens)
    answer = gpt2_ddp.where(recorder.run, text)
    assert step in answer.part_steps
    assert step not in answer.steps
    assert answer.exposures == 0
    assert describe(answer).splitlines()[1] == (
        f"exposures: 0 to the whole text, {answer.part_exposures} to a part of it"
    )
    assert answer.part_exposures == len(answer.uses) > 0


def test_a_branch_has_the_steps_and_ranks_of_its_parent(corpus, tmp_path):
    parent = recorded(corpus, tmp_path, steps=8)
    parent.roll_back(6)
    parent.train(2)
    parent.rows.append({"event": "checkpoint", "step": 8, "sha256": "0" * 64, "kept": [8]})
    parent.write()
    branch = Recorder(
        training_config(
            corpus, tmp_path, {"run_name": "branch", "train.global_batch_tokens": 2 * SIZE}
        ),
        tmp_path,
    )
    branch.feed.seek(parent.feed.state)
    branch.step = 8
    branch.reads = [*parent.reads]
    branch.start(1, 2)
    of_parent = {
        "parent": str(parent.run / "checkpoints/step-00000008"),
        "checkpoint_sha256": "0" * 64,
    }
    state = parent.feed.state.model_dump(mode="json")
    branch.rows.append({"event": "branch", "step": 8} | of_parent | state)
    branch.train(4)
    run = open_run(branch.write(), (), False)
    for read in (branch.reads[3], branch.reads[-1]):
        text = texts(branch, read[-1])
        found = [(use.step, use.rank, use.micro_batch, use.row) for use in find(run, text).uses]
        assert read[:-1] in found
    shutil.rmtree(parent.run)
    run = open_run(branch.run, (), False)
    text = texts(branch, branch.reads[3][-1])
    assert [use.rank for use in find(run, text).uses if use.times] == [None]
    with pytest.raises(UserError, match="the parent run of this branch is missing"):
        [*texts_of(run, PastStep(2, run.history))]


def test_the_texts_of_a_step(two_folders, tmp_path):
    recorder = mixed_run(two_folders, tmp_path)
    run = open_run(recorder.run, (), False)
    for step in (1, 20, 25, 34, 36, 58):
        reads = [read for read in recorder.reads if read[0] == step]
        windows = [*texts_of(run, PastStep(step, run.history))]
        assert [(w.step, w.rank, w.micro_batch, w.row) for w in windows] == [r[:-1] for r in reads]
        for window, read in zip(windows, reads, strict=True):
            assert b"".join(recorder.content(read[-1])).decode(errors="replace") == (
                window.text.replace("<|endoftext|>", "")
            )
    code, out, _ = ask(recorder.run, step=36, rank=3)
    assert code == 0
    assert out.count("--- step 36, rank 3, ") == sum(read[:2] == (36, 3) for read in recorder.reads)
    windows = gpt2_ddp.step_texts(recorder.run, 36, rank=3)
    printed = json.loads(ask(recorder.run, step=36, rank=3, json=True)[1])["steps"][0]["windows"]
    assert [window.text for window in windows] == [window["text"] for window in printed]


def test_the_texts_of_spikes(corpus, tmp_path):
    recorder = recorded(corpus, tmp_path, steps=20)
    recorder.rows[4] |= {"grad_norm": None}  # step 4
    recorder.roll_back(10)
    recorder.train(2)
    recorder.write()
    run = open_run(recorder.run, (), False)
    first, second, *others = spikes(run, "grad_norm")
    assert (first.past.step, first.value, first.past.undone_at) == (4, None, None)
    assert (second.past.step, second.times, second.past.undone_at) == (13, 9.0, 10)
    assert not any(other.stands_out for other in others)
    code, out, _ = ask(recorder.run, spike="grad_norm", spikes=5)
    assert code == 0
    printed = json.loads(ask(recorder.run, spike="grad_norm", spikes=5, json=True)[1])["steps"]
    assert [(step["step"], step["times"], len(step["windows"])) for step in printed] == [
        (4, None, 2),
        (13, 9.0, 2),
    ]
    assert "=== step 13: grad_norm 9, 9.00 times the rows before it; undone by the rollback" in out
    assert out.count("=== step") == 2
    undone = gpt2_ddp.where(recorder.run, next(texts_of(run, second.past, 0)).text[:20])
    assert 13 in {use.step for use in undone.undone}


def run_with_losses(corpus, tmp_path, losses, **changes):
    """A run whose steps have these losses."""
    recorder = recorded(corpus, tmp_path, steps=len(losses), **changes)
    for row, loss in zip(recorder.rows[1:], losses, strict=True):
        row["loss"] = loss
    recorder.write()
    return recorder.run


def falling(steps):
    """Losses that fall from 9 to 3, steeply at first, with noise."""
    rng = random.Random(0)
    return [3 + 6 * 0.8**step + rng.gauss(0, 0.02) for step in range(steps)]


def test_the_first_rows_of_a_falling_loss_are_no_spikes(corpus, tmp_path):
    """Nor is the noise; the answer says so."""
    run = run_with_losses(corpus, tmp_path, falling(60), **{"tracking.log_every": 2})
    code, out, _ = ask(run, spike="loss")
    assert code == 0
    first, farthest, rows = out.splitlines()
    assert first.startswith("no step stands out: none of 55 rows after the warm-up is more than 6")
    assert farthest.endswith(" prints its texts")
    assert rows == "one step in 2 has a row (tracking.log_every); others are not known"
    assert json.loads(ask(run, spike="loss", json=True)[1]) == {"steps": []}
    assert not any(spike.stands_out for spike in spikes(open_run(run, (), False), "loss"))


def test_a_small_spike_of_the_loss_stands_out(corpus, tmp_path):
    """A tenth of the loss. One in the warm-up is none."""
    losses = falling(60)
    losses[39] += 0.3
    losses[3] += 20
    run = run_with_losses(corpus, tmp_path, losses, **{"optim.warmup_steps": 10})
    found = [
        spike.past.step for spike in spikes(open_run(run, (), False), "loss") if spike.stands_out
    ]
    assert found == [40]
    assert ask(run, spike="loss")[1].startswith("=== step 40: loss 3.27")


def test_few_rows_have_no_spike(corpus, tmp_path):
    run = run_with_losses(corpus, tmp_path, [3.0, 9.0, 3.0, 3.0])
    few = "no step stands out: no row after the warm-up has 5 rows before it"
    assert ask(run, spike="loss")[1].startswith(few)


def test_the_run_of_two_layouts_that_was_trained(trained):
    """The rows of a real training: steps 1 to 5 in one process, then 5 in two."""
    (*_, start) = (row for row in all_rows(trained) if row.get("event") == "start")
    windows = gpt2_ddp.step_texts(trained, 7)
    assert {window.rank for window in windows} == {0, 1}
    assert {window.rank for window in gpt2_ddp.step_texts(trained, 5)} == {0}
    item = windows[5]
    middle = item.text[len(item.text) // 3 : 2 * len(item.text) // 3]
    uses = gpt2_ddp.where(trained, middle).uses
    place = (item.step, item.rank, item.micro_batch, item.row)
    assert place in [(use.step, use.rank, use.micro_batch, use.row) for use in uses]
    assert start["processes"] == 2


@pytest.mark.parametrize(
    ("question", "beginning"),
    [
        ({"text": ""}, "text = '': is empty"),
        ({}, "question = None: ask one"),
        ({"text": "a", "step": 3}, "step = 3: text is asked, too"),
        ({"text": "a", "rank": 0}, "rank = 0: is for --step and --spike only"),
        ({"step": 7}, "step = 7: the run has reached step 6"),
        ({"step": 3, "rank": 2}, "rank = 2: step 3 had the ranks 0 to 1"),
        ({"file": "missing.txt"}, "file = missing.txt: cannot be read"),
        ({"text": "a" * (2**20 + 1)}, "text = "),
        ({"text": "a", "data": ["nowhere"]}, "data = nowhere: manifest.json cannot be read"),
    ],
)
def test_wrong_questions_are_one_line(corpus, tmp_path, question, beginning):
    recorder = recorded(corpus, tmp_path)
    with pytest.raises(UserError) as error:
        ask(recorder.run, **question)
    assert len(error.value.mistakes) == 1
    assert error.value.mistakes[0].startswith(beginning), error.value


def test_runs_that_cannot_be_asked(corpus, tmp_path, trained_job):
    def expect(run, words):
        with pytest.raises(UserError, match=words):
            ask(run, text="a")

    expect(tmp_path / "nothing", "there is no such folder")
    expect(corpus, "has no metrics.jsonl")
    expect(trained_job, "is a regression run, without a text")
    recorder = recorded(corpus, tmp_path)
    rows = recorder.run / "metrics.jsonl"
    whole = rows.read_text()
    change(rows, '"step": 3', '"step": 4')
    expect(recorder.run, "line 4: its chain is wrong")
    rows.write_text("")
    expect(recorder.run, "has no start in its first row")
    rows.write_text(whole)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(corpus / "tokenizer.json", other)
    write_shards(other, "other", {"train": [module_text("queue")]})
    with pytest.raises(UserError, match="has other tokens than the run was trained on"):
        ask(recorder.run, text="a", data=[str(other)])
    with pytest.raises(UserError, match="has other tokens than the run was trained on"):
        ask(recorder.run, text="a", data=[str(corpus), str(other)])
    (tmp_path / "text.txt").write_bytes(b"\xff" * 2**21)
    with pytest.raises(UserError, match="is larger than 1,048,576 bytes"):
        ask(recorder.run, file=str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="is no text in UTF-8"):
        ask(recorder.run, file=str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        ask(recorder.run, file=str(tmp_path / "text.txt"))
    recorder.rows.append({"event": "rollback", "step": 4, "from": 6, "skipped_range": [1, 12]})
    recorder.write()
    expect(recorder.run, "the rollback to step 4 does not match its positions")


def test_a_history_is_both_ways():
    history = History(3, 40, ((6, 10), (31, 32)))
    for step in (1, 2, 3, 9, 10, 40):
        positions = history.positions(step)
        steps, places = history.steps_of(positions)
        assert steps.tolist() == [step] * 3
        assert places.tolist() == [0, 1, 2]
        assert not history.is_skipped(positions).any()
    assert history.positions(3).tolist() == [10, 11, 12]
