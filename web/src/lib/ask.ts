// One way to ask, whoever answers: a server, a notebook's kernel, or a file that holds the answers.
import { ANSWER, ERROR, Frames, PART, PROGRESS, unpack, type Answer } from "./wire";

export interface Progress {
  done: number;
  total: number;
  what: string;
}

export interface Hearing {
  signal?: AbortSignal;
  progress?: (told: Progress) => void;
  part?: (answer: Answer<never>) => void;
}

/** Hands over the frames of an answer, piece by piece. */
export type Transport = (question: string, given: unknown, signal?: AbortSignal) => AsyncIterable<Uint8Array>;

export class Refused extends Error {}
/** Nobody was there to answer. */
export class Unanswered extends Refused {}

let transport: Transport = overHttp;

export function answeredBy(other: Transport): void {
  transport = other;
}

export async function ask<F>(question: string, given: unknown, hearing: Hearing = {}): Promise<Answer<F>> {
  const frames = new Frames();
  for await (const piece of transport(question, given, hearing.signal)) {
    for (const { kind, bytes } of frames.push(piece)) {
      if (kind === ANSWER) return unpack<F>(bytes);
      if (kind === PART) hearing.part?.(unpack(bytes));
      else if (kind === PROGRESS) hearing.progress?.(JSON.parse(text(bytes)) as Progress);
      else if (kind === ERROR) throw new Refused((JSON.parse(text(bytes)) as { message: string }).message);
    }
  }
  throw new Unanswered("the answer ended before it was whole; is the server still running?");
}

async function* overHttp(question: string, given: unknown, signal?: AbortSignal): AsyncIterable<Uint8Array> {
  const response = await fetch(`api/ask/${question}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(given),
    signal: signal ?? null,
  }).catch((error: unknown) => {
    if (signal?.aborted) throw error;
    throw new Unanswered("the server does not answer; is `cutaway open` still running?");
  });
  if (!response.ok) {
    const told = (await response.json().catch(() => null)) as { error?: { message?: string } } | null;
    throw new Refused(told?.error?.message ?? `the server answered ${response.status}`);
  }
  if (!response.body) throw new Refused("the server's answer is empty");
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    void reader.cancel().catch(() => undefined); // given up: the server notices, and stops working
  }
}

const text = (bytes: Uint8Array): string => new TextDecoder().decode(bytes);
