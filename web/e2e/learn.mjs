// Learn: lessons by keys, figures show the values of the library, answers are graded; quiz by level, interview, exercises run by the server.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";

export async function run(page, url, facts) {
  await page.goto(`${url}#/learn?text=${encodeURIComponent(facts.text)}`);
  const lessons = page.getByRole("navigation", { name: "Lessons" }).getByRole("listitem");
  await lessons.first().waitFor();
  const numLessons = await lessons.count();
  assert.ok(numLessons >= 15, `${numLessons} lessons`);
  await page.getByRole("region", { name: "Tokens and token ids" }).waitFor();
  const titles = new Set();
  for (let number = 0; number < numLessons; number++) {
    await page.getByText(`${number + 1} of ${numLessons}`).waitFor();
    titles.add(await page.locator(".lesson h2").first().textContent());
    await page.locator("h1").click();
    await page.keyboard.press("ArrowRight");
  }
  assert.equal(titles.size, numLessons);
  await page.keyboard.press("ArrowLeft");
  await page.getByText(`${numLessons - 1} of ${numLessons}`).waitFor();
  await page.goBack();
  await page.getByText(`${numLessons} of ${numLessons}`).waitFor();

  // The values shown by a lesson equal those of the library.
  const links = { "blocks.0.attn.q": "step=queries&layer=0", "blocks.3.attn.pattern": "step=pattern&layer=3", "blocks.5.ffn.hidden": "step=ffn&layer=5" };
  for (const { site, position, index, value } of facts.values.filter((fact) => links[fact.site])) {
    const response = page.waitForResponse(async (candidate) => candidate.url().endsWith("/query/activation") && (candidate.request().postData() ?? "").includes(`"${site}"`));
    await page.goto(`${url}#/learn?${links[site]}&position=${position}&text=${encodeURIComponent(facts.text)}`);
    await response;
    const panel = page.getByRole("region", { name: "Activation" });
    const heatmap = panel.getByRole("img", { name: /Arrow keys show values/ });
    await heatmap.waitFor();
    await page.waitForTimeout(150);
    await heatmap.focus();
    await page.keyboard.press("Home");
    for (let step = 0; step < index; step++) await page.keyboard.press("ArrowRight");
    const readout = await panel.locator(".readout").innerText();
    assert.ok(readout.endsWith(`: ${value}`), `${site} at position ${position}, index ${index}: the page shows ${readout}, the library ${value}`);
  }

  // An incorrect answer shows an explanation and the correct answer; a correct one is counted.
  await page.goto(`${url}#/learn?step=mask&text=${encodeURIComponent(facts.text)}`);
  const form = page.locator("form").filter({ hasText: "An encoder-decoder has three kinds of attention" });
  await form.getByRole("button", { name: "Answer" }).click();
  await form.getByText("Select an answer first.").waitFor();
  await form.getByLabel("All three").check();
  await form.getByRole("button", { name: "Answer" }).click();
  await form.getByText("Incorrect.").waitFor();
  await form.getByText("Correct answer:").waitFor();
  await form.getByLabel("The decoder's self-attention", { exact: true }).check();
  await form.getByRole("button", { name: /Answer/ }).click();
  await form.getByText("Correct.").waitFor();
  await form.getByText("Python code that verifies the answer").click();
  await form.getByText("import cutaway as ct").waitFor();
  await page.getByRole("navigation", { name: "Parts of the screen Learn" }).getByRole("button", { name: /^Quiz 1\/\d+$/ }).waitFor();
  await page.reload();
  await page.getByRole("button", { name: /^Quiz 1\/\d+$/ }).waitFor();

  // The notebook of a lesson opens on the server.
  await page.goto(`${url}#/learn?step=scores`);
  const opened = page.context().waitForEvent("page");
  await page.getByText("documentation:").getByRole("link", { name: /^notebook \d+$/ }).click();
  const notebook = await opened;
  await notebook.getByRole("heading", { level: 1, name: /^\d+\. / }).waitFor();
  assert.ok((await notebook.locator("math").count()) > 0, "the notebook's page has no formulas");
  await notebook.close();

  await page.goto(`${url}#/learn?step=pattern`);
  await page.getByRole("region", { name: "Exercise 1" }).getByRole("button", { name: "Open exercise 1" }).click();
  await page.getByRole("heading", { name: "Exercise 1: Attention by hand" }).waitFor();
  await useWithoutToken(page);
  await useQuiz(page, url);
  await useInterview(page, url);
  await solveExercise(page, url, facts);
}

/** Without the token, the page shows the commands and the hints, and runs no code. */
async function useWithoutToken(page) {
  await page.getByText("this page was opened without its token").waitFor();
  await page.getByText("cutaway learn check 1", { exact: false }).first().waitFor();
  assert.equal(await page.getByRole("textbox").count(), 0);
  await page.getByRole("button", { name: "Show a hint" }).click();
  await page.getByRole("button", { name: "Next hint" }).click();
  assert.equal(await page.locator("article ol").getByRole("listitem").count(), 2);
}

/** Questions of one level and section; an answer counts in the score of its level. */
async function useQuiz(page, url) {
  await page.goto(`${url}#/learn?tab=quiz`);
  const score = page.getByRole("row", { name: /^what-if/ }).getByRole("cell");
  assert.equal((await score.nth(1).innerText()).trim(), "0");
  await page.getByLabel("Level").selectOption("what-if");
  const count = Number(/^(\d+) question/.exec(await page.getByText(/^\d+ questions?;/).innerText())[1]);
  assert.ok(count > 5);
  const levels = await page.locator("form .level").allInnerTexts();
  assert.ok(levels.length > 0 && levels.every((level) => level === "what-if"), levels.join());
  const question = page.locator("form").first();
  if (await question.getByRole("textbox").count()) await question.getByRole("textbox").fill("1");
  else await question.locator("label").first().click();
  await question.getByRole("button", { name: "Answer" }).click();
  await question.getByText(/^(Correct|Incorrect)\./).waitFor();
  assert.equal((await score.nth(1).innerText()).trim(), "1");
  await page.getByLabel("Section").selectOption({ index: 1 });
  assert.match(page.url(), /level=what-if&.*section=/);
  assert.ok(Number(/^(\d+) question/.exec(await page.getByText(/^\d+ questions?;/).innerText())[1]) < count);
}

/** One interview question: answer, model answer, key points, next question. */
async function useInterview(page, url) {
  await page.goto(`${url}#/learn?tab=interview&interview_level=hard`);
  const form = page.getByRole("region", { name: "Interview question" });
  const first = await form.getByRole("heading").first().innerText();
  await form.getByLabel("Your answer").fill("Softmax is shift invariant.");
  await form.getByRole("button", { name: "Show the model answer" }).click();
  await form.getByRole("heading", { name: "Model answer" }).waitFor();
  await form.getByRole("checkbox").first().check();
  await form.getByRole("button", { name: /^Record 1 of \d key points/ }).click();
  await page.getByText(/hard: 1 of \d+ answered, 0 with all key points/).waitFor();
  assert.notEqual(await form.getByRole("heading").first().innerText(), first);
}

const WRONG = `import math

import torch
from torch import Tensor


def attention_weights(q, k):
    return torch.softmax(q @ k.transpose(-2, -1), -1)


def attention(q, k, v):
    return attention_weights(q, k) @ v
`;

/** With the token: a wrong solution and its diagnosis, a hint, a canceled infinite loop, a correct solution, a file changed elsewhere. */
async function solveExercise(page, url, facts) {
  await page.goto("about:blank");
  await page.goto(`${url}#/learn?tab=exercises&exercise=1&exercise_token=${facts.exercise_token}`);
  const editor = page.getByRole("textbox", { name: "Code of exercise 1" });
  await editor.waitFor();
  assert.ok(!page.url().includes(facts.exercise_token), "the address still has the token");
  assert.match(await editor.inputValue(), /raise NotImplementedError/);
  assert.ok(await page.getByRole("button", { name: "Show solution" }).isDisabled());

  // Tab inserts spaces, which the browser can undo; Escape and Tab leaves the editor.
  await editor.fill("def f():");
  await editor.press("End");
  await editor.press("Enter");
  await page.keyboard.type("return 1");
  assert.equal(await editor.inputValue(), "def f():\n    return 1");
  await editor.press("Tab");
  assert.equal(await editor.inputValue(), "def f():\n    return 1    ");
  await editor.press("Control+z"); // the browser may undo several insertions at once
  assert.ok(["def f():\n    return 1", "def f():"].includes(await editor.inputValue()), await editor.inputValue());
  await editor.press("Escape");
  await page.keyboard.press("Tab");
  assert.notEqual(await page.evaluate(() => document.activeElement?.tagName), "TEXTAREA");

  const run = page.getByRole("button", { name: "Run", exact: true });
  const grade = page.getByRole("status", { name: "Grade" });
  await editor.fill(WRONG);
  await run.click();
  await grade.getByRole("heading", { name: "Not passed yet." }).waitFor();
  await grade.getByText("no √d").first().waitFor();
  if (process.env.SCREENSHOTS) await takeScreenshots(page, "exercise");

  await page.getByRole("button", { name: "Next hint (0 of 3)" }).click();
  await page.getByRole("button", { name: "Next hint (1 of 3)" }).waitFor();
  assert.equal(await page.getByRole("region", { name: "Hints" }).getByRole("listitem").count(), 1);
  await page.getByRole("button", { name: "Show solution" }).click();
  await page.getByRole("region", { name: "Solution" }).getByText("scores.amax").waitFor();

  await editor.fill("while True:\n    pass\n");
  await run.click();
  await page.getByText("running the test cases").waitFor();
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.getByText("Canceled; the process was ended.").waitFor();

  const solution = WRONG.replace("k.transpose(-2, -1)", "k.transpose(-2, -1) / math.sqrt(q.shape[-1])");
  await editor.fill("");
  await editor.focus();
  await page.keyboard.insertText(solution);
  await editor.press("Control+Enter");
  await grade.getByRole("heading", { name: "Passed: all functions are correct." }).waitFor();
  await page.getByRole("navigation", { name: "Exercises" }).getByRole("button", { name: "1. Attention by hand passed" }).waitFor();

  // A file that another program has changed is not overwritten without a question.
  const path = (await page.locator(".path").innerText()).trim();
  writeFileSync(path, "theirs = 1\n");
  await editor.fill("mine = 1\n");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await page.getByText("Another program has changed").waitFor();
  assert.equal(readFileSync(path, "utf8"), "theirs = 1\n");
  await page.getByRole("button", { name: "Keep the editor's text" }).click();
  await page.getByText(/^Saved to /).waitFor();
  assert.equal(readFileSync(path, "utf8"), "mine = 1\n");
  await page.getByRole("button", { name: "Reset", exact: true }).click();
  await page.getByRole("button", { name: "Reset now" }).click();
  await page.getByText(/^The old file is kept as /).waitFor();
  assert.match(await editor.inputValue(), /raise NotImplementedError/);

  // With the token, progress is that of the command line.
  await page.getByRole("navigation", { name: "Parts of the screen Learn" }).getByRole("button", { name: /^Quiz/ }).click();
  await page.getByText("Answers are stored with those of cutaway learn quiz.").waitFor();
  const recorded = page.waitForResponse((response) => response.url().endsWith("/record_quiz_answer"));
  const question = page.locator("form").filter({ has: page.getByRole("radio") }).first();
  await question.locator("label").first().click();
  await question.getByRole("button", { name: "Answer" }).click();
  assert.equal((await recorded).status(), 200);
  if (process.env.SCREENSHOTS) await takeScreenshots(page, "quiz");
  await page.getByRole("button", { name: "Interview", exact: true }).click();
  await page.getByRole("button", { name: "Show the model answer" }).click();
  if (process.env.SCREENSHOTS) await takeScreenshots(page, "interview");
}

async function takeScreenshots(page, name) {
  for (const [width, scheme] of [[1280, "light"], [1280, "dark"], [390, "light"]]) {
    await page.setViewportSize({ width, height: 900 });
    await page.emulateMedia({ colorScheme: scheme });
    await page.waitForTimeout(300);
    await page.screenshot({ path: `${process.env.SCREENSHOTS}/${name}-${width}-${scheme}.png`, fullPage: true });
    const [scrollWidth, clientWidth] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
    assert.ok(scrollWidth <= clientWidth, `${name} is ${scrollWidth} px wide at ${width}`);
  }
  await page.setViewportSize({ width: 1280, height: 900 });
  await page.emulateMedia({ colorScheme: "light" });
}
