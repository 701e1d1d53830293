// An example client of a fleet head: a session, a prompt, an answer that survives what fails on its way.
import { randomUUID } from "node:crypto";
import { parseArgs } from "node:util";
import type { ServiceError } from "@grpc/grpc-js";
import {
  AppendTokensRequest,
  CreateSessionRequest,
  GenerateRequest,
  type CreateSessionResponse,
  type Finished,
  type FleetServiceClient,
} from "../gen/fleet/v1/fleet_service.js";
import { FinishReason } from "../gen/fleet/v1/types.js";
import { connect } from "./connect.js";
import { decode, describe, isServiceError } from "./errors.js";
import { generate, GRACE_MS } from "./generation.js";

const WHOLE = 0; // the answer ended by itself: EOS, STOP, LENGTH
const REFUSED = 1; // the head refused; its reason is printed
const WRONG_USE = 2;
const NOT_REACHED = 3; // the connection failed, or the deadline passed
const ENDED_TOO_EARLY = 4; // CANCELLED, WALL_CLOCK, ERROR; the tokens printed stand

interface Job {
  model: string;
  prompt: number[];
  maxTokens: number;
  deadlineMs: number;
  cancelAfter: number;
}

/** Opens a session, appends the prompt, prints the answer as it comes, and finishes the session. */
async function run(fleet: FleetServiceClient, job: Job): Promise<Finished> {
  // With an id for each request, a call that is tried again is done once.
  const id = randomUUID();
  const create = CreateSessionRequest.fromPartial({ spec: { model: job.model }, requestId: `${id}-create` });
  const { session } = await answer<CreateSessionResponse>((done) => fleet.createSession(create, done));
  const sessionId = session?.sessionId ?? "";
  try {
    const append = AppendTokensRequest.fromPartial({ sessionId, tokenIds: job.prompt, requestId: `${id}-append` });
    await answer((done) => fleet.appendTokens(append, done));
    const request = GenerateRequest.fromPartial({
      sessionId,
      requestId: `${id}-generate`,
      spec: { maxNewTokens: job.maxTokens, maxWallMs: job.deadlineMs, disconnectGraceMs: GRACE_MS },
    });
    return await print(fleet, request, job);
  } finally {
    // Frees what the session holds; left alone, it would expire.
    await answer((done) => fleet.finishSession({ sessionId }, done)).catch(tell);
  }
}

/** Prints tokens, and cancels when there are enough. */
async function print(fleet: FleetServiceClient, request: GenerateRequest, job: Job): Promise<Finished> {
  let generationId = "";
  let count = 0;
  // The head keeps the time; our own deadline, a little later, is for a head that says nothing.
  const deadline = new Date(Date.now() + job.deadlineMs + 5_000);
  for await (const event of generate(fleet, request, deadline)) {
    switch (event.$case) {
      case "accepted":
        generationId = event.value.generationId;
        break;
      case "started":
        console.error(`started on ${event.value.node}`);
        break;
      case "moved":
        console.error(`moved from ${event.value.fromNode} to ${event.value.toNode}`);
        break;
      case "tokens": {
        const before = count;
        for (const token of event.value.tokenIds) console.log(token);
        count += event.value.tokenIds.length;
        if (before < job.cancelAfter && count >= job.cancelAfter) {
          // The stream goes on to its end, which then is CANCELLED.
          await answer((done) => fleet.cancelGeneration({ generationId }, done)).catch(tell);
        }
        break;
      }
      case "finished":
        return event.value;
    }
  }
  throw new Error("unreachable: `finished` is the last event");
}

/** Turns a call with a callback into a promise. */
function answer<R>(call: (done: (error: ServiceError | null, response: R) => void) => void): Promise<R> {
  return new Promise((resolve, reject) => {
    call((error, response) => (error ? reject(error) : resolve(response)));
  });
}

/** Prints an error of a call and gives the exit code. */
function tell(error: unknown): number {
  if (!isServiceError(error)) throw error;
  const said = decode(error);
  console.error(describe(said));
  return said.reason ? REFUSED : NOT_REACHED;
}

/** Prints how a generation ended and gives the exit code. */
function tellFinish(finished: Finished): number {
  const reason = FinishReason[finished.reason].replace("FINISH_REASON_", "");
  console.error(`finished: ${reason}, ${finished.outputTokens} tokens`);
  if (finished.error) console.error(`${finished.error.reason}: ${finished.error.message}`);
  return ["EOS", "STOP", "LENGTH"].includes(reason) ? WHOLE : ENDED_TOO_EARLY;
}

async function main(): Promise<number> {
  let fleet: FleetServiceClient;
  let job: Job;
  try {
    const { values } = parseArgs({
      options: {
        address: { type: "string", default: "127.0.0.1:8455" }, // the head, HOST:PORT
        ca: { type: "string" }, // file with the certificate authority to believe; without it there is no TLS
        "token-file": { type: "string" }, // file with the token to show; needs --ca
        model: { type: "string", default: "demo" },
        prompt: { type: "string", default: "1,2,3" }, // token ids
        "max-tokens": { type: "string", default: "16" },
        deadline: { type: "string", default: "60" }, // seconds the answer may take in all
        "cancel-after": { type: "string", default: "0" }, // cancel once there are so many tokens; 0 = never
      },
    });
    if (values["token-file"] && !values.ca) throw new Error("--token-file needs --ca: a token is shown over TLS only");
    job = {
      model: values.model,
      prompt: values.prompt.split(",").map(number),
      maxTokens: number(values["max-tokens"]),
      deadlineMs: number(values.deadline) * 1000,
      cancelAfter: number(values["cancel-after"]),
    };
    fleet = connect(values.address, values.ca, values["token-file"]);
  } catch (error) {
    console.error(error instanceof Error ? error.message : error);
    return WRONG_USE;
  }
  try {
    return tellFinish(await run(fleet, job));
  } catch (error) {
    return tell(error);
  } finally {
    fleet.close();
  }
}

function number(text: string): number {
  const value = Number(text);
  if (!text.trim() || !(value >= 0)) throw new Error(`${text} is not a number that can be used here`);
  return value;
}

process.exitCode = await main();
