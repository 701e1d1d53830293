package fleet.example;

import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/**
 * What a head says with an error. Branch on the reason, never on the message.
 *
 * @param reason empty where the head said nothing: the connection failed, or the deadline passed
 * @param retryAfterSeconds 0 = asking again does not help
 */
record Refusal(
        Status.Code code,
        String message,
        String reason,
        Map<String, String> metadata,
        List<String> violations,
        double retryAfterSeconds) {

    /** Takes the details out of the error of a call. */
    static Refusal of(StatusRuntimeException error) {
        String reason = "";
        Map<String, String> metadata = Map.of();
        List<String> violations = new ArrayList<>();
        double retryAfterSeconds = 0;
        try {
            for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
                if (detail.is(ErrorInfo.class)) {
                    ErrorInfo info = detail.unpack(ErrorInfo.class);
                    reason = info.getReason();
                    metadata = info.getMetadataMap();
                } else if (detail.is(RetryInfo.class)) {
                    Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
                    retryAfterSeconds = delay.getSeconds() + delay.getNanos() / 1e9;
                } else if (detail.is(BadRequest.class)) {
                    detail.unpack(BadRequest.class).getFieldViolationsList().forEach(
                            each -> violations.add(each.getField() + " " + each.getDescription()));
                }
            }
        } catch (InvalidProtocolBufferException unreadable) {
            // Without its details an error is one without a reason.
        }
        Status status = error.getStatus();
        String message = status.getDescription();
        if (status.getCause() != null) {
            message += " (" + status.getCause().getMessage() + ")";
        }
        return new Refusal(status.getCode(), message, reason, metadata, violations, retryAfterSeconds);
    }

    /** Tells that the connection failed or the head ends, and not the request. */
    boolean connectionLost() {
        return (reason.isEmpty() || reason.equals("HEAD_DRAINING")) && switch (code) {
            case UNAVAILABLE, INTERNAL, UNKNOWN, CANCELLED -> true; // the last while the head ends
            default -> false;
        };
    }

    @Override
    public String toString() {
        if (reason.isEmpty()) {
            return "failed: " + code + ": " + message;
        }
        List<String> lines = new ArrayList<>(List.of("refused: " + reason + ": " + message));
        metadata.forEach((key, value) -> lines.add("  " + key + " = " + value));
        violations.forEach(each -> lines.add("  " + each));
        if (retryAfterSeconds > 0) {
            lines.add(String.format(Locale.ROOT, "  try again in %.1f s", retryAfterSeconds));
        }
        return String.join("\n", lines);
    }
}
