// Types of the checks and their findings, as in cutaway.check.report.finding.
import type { Line } from "../../components/LineChart.svelte";
import { describeSkip } from "./skipReasons";

const SKIPPED = "skipped: ";

export type Verdict = "pass" | "fail" | "inconclusive" | "warn" | "skip";

export interface CheckInfo {
  name: string;
  title: string;
  subject: string;
  /** The bug that the check finds. */
  catches: string;
  /** How the check works. */
  description: string;
  /** Whether training runs the check before its first step. */
  preflight: boolean;
}

/** Measured values that can be drawn: the rows of a matrix, or lines over one axis. */
export interface MeasuredArray {
  kind: "matrix" | "lines";
  title: string;
  x_label: string;
  y_label: string;
  values: number[][];
  names: string[];
  expected: string;
}

export interface CaseResult {
  verdict: Verdict;
  message: string;
  measured: number | null;
  threshold: number | null;
  /** Which side of the threshold is correct; null without a threshold. */
  bound: "at most" | "at least" | null;
  location: string | null;
  cause: string | null;
  fix: string | null;
  array: MeasuredArray | null;
}

export interface Finding extends CaseResult {
  check: string;
  seconds: number;
  /** Check that probably names the cause of this problem more precisely. */
  symptom_of: string | null;
  /** Whether the check applies, but was not run because another check failed or the time was over. */
  not_run: boolean;
  cases: CaseResult[];
}

export const VERDICT_NAMES: Record<Verdict, string> = { pass: "passed", fail: "failed", inconclusive: "inconclusive", warn: "warning", skip: "does not apply" };

/** Message; that of a skipped check is the reason in words. */
export const shownMessage = ({ message }: CaseResult): string => (message.startsWith(SKIPPED) ? describeSkip(message.slice(SKIPPED.length)) : message);

/** Whether a finding needs attention. */
export const isProblem = (verdict: Verdict | undefined): boolean => verdict === "fail" || verdict === "inconclusive" || verdict === "warn";

const count = (number: number, singular: string, plural: string): string => `${number} ${number === 1 ? singular : plural}`;

/** One sentence on all findings: `41 checks passed, 0 failed, 12 do not apply`. */
export function summarize(findings: readonly Finding[]): string {
  const number = (verdict: Verdict): number => findings.filter((finding) => finding.verdict === verdict).length;
  const notRun = findings.filter((finding) => finding.not_run).length;
  const parts = [`${count(number("pass"), "check", "checks")} passed`, `${number("fail")} failed`];
  if (number("inconclusive")) parts.push(`${number("inconclusive")} inconclusive`);
  if (number("warn")) parts.push(count(number("warn"), "warning", "warnings"));
  parts.push(`${count(number("skip") - notRun, "does", "do")} not apply`);
  if (notRun) parts.push(`${notRun} not run`);
  return parts.join(", ");
}

const LINE_COLORS: Line["color"][] = ["accent", "positive", "negative", "success", "text", "muted"];

/** Lines of a chart; at most as many as there are colors. */
export function toLines(array: MeasuredArray): Line[] {
  return array.values.slice(0, LINE_COLORS.length).map((values, number) => ({
    name: shortenName(array.names[number] ?? String(number)),
    color: LINE_COLORS[number] ?? "muted",
    x: values.map((_, index) => index),
    y: values,
    dots: values.length <= 40,
  }));
}

/** Module path without its constant parts: `decoder.blocks.0.attn.f.kernel` → `blocks.0.attn`. */
export const shortenName = (name: string): string => name.replace(/\.f\.kernel$|\.kernel$/, "").replace(/^decoder\.(?=blocks)/, "");
