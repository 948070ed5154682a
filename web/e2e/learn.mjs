// Learn: lessons by keys, figures show the values of the library, answers are graded with an explanation, hints.
import assert from "node:assert/strict";

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
  await page.getByRole("button", { name: /^All \d+ questions 1 correct/ }).click();
  await page.getByRole("heading", { name: /questions, 1 answered correctly/ }).waitFor();
  await page.reload();
  await page.getByRole("heading", { name: /questions, 1 answered correctly/ }).waitFor();

  // The notebook of a lesson opens on the server.
  await page.goto(`${url}#/learn?step=scores`);
  const opened = page.context().waitForEvent("page");
  await page.getByText("documentation page").getByRole("link", { name: /^notebook \d+$/ }).click();
  const notebook = await opened;
  await notebook.getByRole("heading", { level: 1, name: /^\d+\. / }).waitFor();
  assert.ok((await notebook.locator("math").count()) > 0, "the notebook's page has no formulas");
  await notebook.close();

  // Hints are shown one at a time.
  await page.goto(`${url}#/learn?step=pattern`);
  const exercise = page.getByRole("region", { name: "Exercise 1" });
  await exercise.getByRole("button", { name: "Show a hint" }).click();
  await exercise.getByRole("button", { name: "Next hint" }).click();
  assert.equal(await exercise.getByRole("listitem").count(), 2);
}
