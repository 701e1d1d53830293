import { Metadata, status as Code, type ServiceError } from "@grpc/grpc-js";
import { BadRequest, ErrorInfo, RetryInfo } from "../gen/google/rpc/error_details.js";
import { Status } from "../gen/google/rpc/status.js";

/** What a head says with an error. Branch on the reason, never on the message. */
export interface Refusal {
  code: Code;
  message: string;
  /** Empty where the head said nothing: the connection failed, or the deadline passed. */
  reason: string;
  metadata: Record<string, string>;
  violations: string[];
  /** Undefined: asking again does not help. */
  retryAfterMs?: number;
}

/** Takes the details out of the error of a call. */
export function decode(error: ServiceError): Refusal {
  const said: Refusal = { code: error.code, message: error.details, reason: "", metadata: {}, violations: [] };
  const trailer = error.metadata?.get("grpc-status-details-bin")[0];
  if (!Buffer.isBuffer(trailer)) return said;
  for (const { typeUrl, value } of Status.decode(trailer).details) {
    switch (typeUrl) {
      case "type.googleapis.com/google.rpc.ErrorInfo":
        ({ reason: said.reason, metadata: said.metadata } = ErrorInfo.decode(value));
        break;
      case "type.googleapis.com/google.rpc.RetryInfo": {
        const delay = RetryInfo.decode(value).retryDelay;
        if (delay) said.retryAfterMs = Number(delay.seconds) * 1000 + delay.nanos / 1e6;
        break;
      }
      case "type.googleapis.com/google.rpc.BadRequest":
        said.violations = BadRequest.decode(value).fieldViolations.map((each) => `${each.field} ${each.description}`);
        break;
    }
  }
  return said;
}

/** An error as gRPC makes them. */
export function serviceError(code: Code, details: string): ServiceError {
  return Object.assign(new Error(details), { code, details, metadata: new Metadata() });
}

/** Tells an error of a call from any other. */
export function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "details" in error;
}

/** Tells that the connection failed or the head ends, and not the request. */
export function connectionLost(error: ServiceError): boolean {
  const { code, reason } = decode(error);
  const lost = [Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN, Code.CANCELLED]; // the last while the head ends
  return ["", "HEAD_DRAINING"].includes(reason) && lost.includes(code);
}

/** For people. */
export function describe(said: Refusal): string {
  if (!said.reason) return `failed: ${Code[said.code]}: ${said.message}`;
  return [
    `refused: ${said.reason}: ${said.message}`,
    ...Object.entries(said.metadata).map(([key, value]) => `  ${key} = ${value}`),
    ...said.violations.map((each) => `  ${each}`),
    ...(said.retryAfterMs === undefined ? [] : [`  try again in ${(said.retryAfterMs / 1000).toFixed(1)} s`]),
  ].join("\n");
}
