// Learn: every lesson by keys, the picture of each is the model's own, answers are judged with their reason, and a link leads back.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  await page.goto(`${url}#/learn?text=${encodeURIComponent(facts.text)}`);
  const lessons = page.getByRole("navigation", { name: "Lessons" }).getByRole("listitem");
  await lessons.first().waitFor();
  const many = await lessons.count();
  assert.ok(many >= 15, `${many} lessons`);
  await page.getByRole("region", { name: "Tokens and their numbers" }).waitFor();
  const titles = new Set();
  for (let number = 0; number < many; number++) {
    await page.getByText(`${number + 1} of ${many}`).waitFor();
    titles.add(await page.locator(".lesson h2").first().textContent());
    await page.locator("h1").click();
    await page.keyboard.press("ArrowRight");
  }
  assert.equal(titles.size, many);
  await page.keyboard.press("ArrowLeft");
  await page.getByText(`${many - 1} of ${many}`).waitFor();
  await page.goBack();
  await page.getByText(`${many} of ${many}`).waitFor();

  // What a lesson shows is what Python says.
  const shown = { "blocks.0.attn.q": "step=queries&layer=0", "blocks.3.attn.pattern": "step=pattern&layer=3", "blocks.5.ffn.hidden": "step=ffn&layer=5" };
  for (const { site, position, index, values } of facts.values.filter((each) => shown[each.site])) {
    const answered = page.waitForResponse(async (response) => response.url().endsWith("/query/activation") && (response.request().postData() ?? "").includes(`"${site}"`));
    await page.goto(`${url}#/learn?${shown[site]}&position=${position}&text=${encodeURIComponent(facts.text)}`);
    await answered;
    const stage = page.getByRole("region", { name: "Stage" });
    const field = stage.getByRole("img", { name: /Arrow keys read values/ });
    await field.waitFor();
    await page.waitForTimeout(150);
    await field.focus();
    await page.keyboard.press("Home");
    for (let step = 0; step < index; step++) await page.keyboard.press("ArrowRight");
    const told = await stage.locator(".said").innerText();
    assert.ok(told.endsWith(`: ${values}`), `${site} at ${position}, number ${index}: the page says ${told}, Python ${values}`);
  }

  // A wrong answer says why, and what is right; the right one counts.
  await page.goto(`${url}#/learn?step=mask&text=${encodeURIComponent(facts.text)}`);
  const form = page.locator("form").filter({ hasText: "An encoder-decoder has three kinds of attention" });
  await form.getByRole("button", { name: "Answer" }).click();
  await form.getByText("Choose one of them first.").waitFor();
  await form.getByLabel("All three").check();
  await form.getByRole("button", { name: "Answer" }).click();
  await form.getByText("Not so.").waitFor();
  await form.getByText("Rather:").waitFor();
  await form.getByLabel("The decoder's self-attention", { exact: true }).check();
  await form.getByRole("button", { name: /Answer/ }).click();
  await form.getByText("Right.").waitFor();
  await form.getByText("The program that proves it").click();
  await form.getByText("import cutaway as ct").waitFor();
  await page.getByRole("button", { name: /^All \d+ questions 1 right/ }).click();
  await page.getByRole("heading", { name: /questions, 1 answered right/ }).waitFor();
  await page.reload();
  await page.getByRole("heading", { name: /questions, 1 answered right/ }).waitFor();

  // Hints come one by one.
  await page.goto(`${url}#/learn?step=pattern`);
  const exercise = page.getByRole("region", { name: "Exercise 1" });
  await exercise.getByRole("button", { name: "A hint" }).click();
  await exercise.getByRole("button", { name: "Another hint" }).click();
  assert.equal(await exercise.getByRole("listitem").count(), 2);
}
