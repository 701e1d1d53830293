import { setTimeout as sleep } from "node:timers/promises";
import { Metadata, status as Code, type ClientReadableStream } from "@grpc/grpc-js";
import {
  AttachGenerationRequest,
  type FleetServiceClient,
  type GenerateRequest,
  type GenerationEvent,
} from "../gen/fleet/v1/fleet_service.js";
import { connectionLost, isServiceError, serviceError } from "./errors.js";

/** How long a generation waits for its reader to come back, and its reader tries to. */
export const GRACE_MS = 10_000;

export type Event = NonNullable<GenerationEvent["event"]>;

/**
 * Reads one generation to its end, whatever becomes of the connection and the head: every token once and in order,
 * `finished` last. Leaving the loop over it tells the head that we left.
 *
 * For that the request needs a request id, and GRACE_MS as its disconnectGraceMs. Where the head lost tokens that it
 * gave, the error's reason is DATA_LOSS: those from its metadata's nextIndex on are to be dropped.
 */
export async function* generate(
  fleet: FleetServiceClient,
  request: GenerateRequest,
  deadline: Date,
): AsyncGenerator<Event> {
  const place = AttachGenerationRequest.create(); // takes it up behind all that came
  let lostAt = 0; // 0 = the connection is well
  let waitMs = 0;
  for (;;) {
    // Once the generation is known, it is taken up.
    const stream: ClientReadableStream<{ event?: GenerationEvent | undefined }> = place.generationId
      ? fleet.attachGeneration(place, new Metadata(), { deadline })
      : fleet.generate(request, new Metadata(), { deadline });
    stream.on("error", () => undefined); // told below; one that comes after we left is nobody's
    let lost = serviceError(Code.UNAVAILABLE, "the stream ended before the generation did");
    try {
      for await (const response of stream) {
        const event: Event | undefined = response.event?.event;
        if (!response.event || !event) continue; // of a newer head
        lostAt = waitMs = 0;
        place.branch = response.event.branch;
        if (event.$case === "accepted") place.generationId = event.value.generationId;
        if (event.$case === "tokens") place.fromIndex = event.value.firstIndex + event.value.tokenIds.length;
        yield event;
        if (event.$case === "finished") return;
      }
    } catch (error) {
      if (!isServiceError(error) || !connectionLost(error)) throw error;
      lost = error;
    } finally {
      stream.cancel();
    }
    lostAt ||= Date.now();
    if (Date.now() - lostAt > GRACE_MS) throw lost;
    console.error(`connection lost, going on at ${place.fromIndex}`);
    await sleep(waitMs * (0.5 + Math.random() / 2));
    waitMs = Math.min(Math.max(100, 2 * waitMs), 1000);
  }
}
