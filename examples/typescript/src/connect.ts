import { readFileSync } from "node:fs";
import { credentials, Metadata, type ChannelCredentials } from "@grpc/grpc-js";
import { FleetServiceClient } from "../gen/fleet/v1/fleet_service.js";

// What is published beside the contract: timeouts, and which calls are tried again by gRPC itself.
const serviceConfig = readFileSync(new URL("../../gen/service_config.json", import.meta.url), "utf8");

/**
 * Gives a client of a head: with TLS where there is a CA file, with a token on every call where there is a token file.
 * It connects on the first call, and anew when the connection breaks.
 */
export function connect(address: string, caFile?: string, tokenFile?: string): FleetServiceClient {
  return new FleetServiceClient(address, channelCredentials(caFile, tokenFile), {
    "grpc.service_config": serviceConfig,
    "grpc.max_reconnect_backoff_ms": 1_000,
    // Tells a connection that has died in silence; without calls nothing is sent.
    "grpc.keepalive_time_ms": 15_000,
    "grpc.keepalive_timeout_ms": 5_000,
  });
}

function channelCredentials(caFile?: string, tokenFile?: string): ChannelCredentials {
  if (!caFile) return credentials.createInsecure();
  const secure = credentials.createSsl(readFileSync(caFile));
  if (!tokenFile) return secure;
  const shown = new Metadata();
  shown.set("authorization", `Bearer ${readFileSync(tokenFile, "utf8").trim()}`);
  const bearer = credentials.createFromMetadataGenerator((_call, done) => done(null, shown));
  return credentials.combineChannelCredentials(secure, bearer);
}
