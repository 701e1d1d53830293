package fleet.example;

import fleet.v1.FleetServiceGrpc;
import fleet.v1.FleetServiceGrpc.FleetServiceBlockingStub;
import fleet.v1.FleetServiceOuterClass.AppendTokensRequest;
import fleet.v1.FleetServiceOuterClass.CancelGenerationRequest;
import fleet.v1.FleetServiceOuterClass.CreateSessionRequest;
import fleet.v1.FleetServiceOuterClass.FinishSessionRequest;
import fleet.v1.FleetServiceOuterClass.Finished;
import fleet.v1.FleetServiceOuterClass.GenerateRequest;
import fleet.v1.FleetServiceOuterClass.GenerationEvent;
import fleet.v1.FleetServiceOuterClass.GenerationSpec;
import fleet.v1.FleetServiceOuterClass.SessionSpec;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import java.io.IOException;
import java.nio.file.Path;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

/** An example client of a fleet head: a session, a prompt, an answer that survives what fails on its way. */
final class Main {
    /** The answer ended by itself: EOS, STOP, LENGTH. */
    private static final int WHOLE = 0;

    /** The head refused; its reason is printed. */
    private static final int REFUSED = 1;

    private static final int WRONG_USE = 2;

    /** The connection failed, or the deadline passed. */
    private static final int NOT_REACHED = 3;

    /** CANCELLED, WALL_CLOCK, ERROR; the tokens printed stand. */
    private static final int ENDED_TOO_EARLY = 4;

    private final ManagedChannel channel;
    private final FleetServiceBlockingStub fleet;
    private final Options options;

    private Main(ManagedChannel channel, Options options) {
        this.channel = channel;
        this.fleet = FleetServiceGrpc.newBlockingStub(channel);
        this.options = options;
    }

    public static void main(String[] arguments) throws InterruptedException {
        int code;
        try {
            Options options = Options.parse(arguments);
            ManagedChannel channel = Connection.open(options.address(), options.ca(), options.tokenFile());
            code = new Main(channel, options).runAndTell();
            channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
        } catch (IllegalArgumentException | IOException error) {
            System.err.println(error.getMessage());
            code = WRONG_USE;
        }
        System.exit(code);
    }

    /** Opens a session, appends the prompt, prints the answer as it comes, and finishes the session. */
    private Finished run() throws InterruptedException {
        // With an id for each request, a call that is tried again is done once.
        String id = UUID.randomUUID().toString();
        String sessionId = fleet.createSession(CreateSessionRequest.newBuilder()
                        .setSpec(SessionSpec.newBuilder().setModel(options.model()))
                        .setRequestId(id + "-create")
                        .build())
                .getSession()
                .getSessionId();
        try {
            fleet.appendTokens(AppendTokensRequest.newBuilder()
                    .setSessionId(sessionId)
                    .addAllTokenIds(options.prompt())
                    .setRequestId(id + "-append")
                    .build());
            GenerateRequest request = GenerateRequest.newBuilder()
                    .setSessionId(sessionId)
                    .setRequestId(id + "-generate")
                    .setSpec(GenerationSpec.newBuilder()
                            .setMaxNewTokens(options.maxTokens())
                            .setMaxWallMs(options.deadlineMs())
                            .setDisconnectGraceMs(Generation.GRACE_MS))
                    .build();
            // The head keeps the time; our own deadline, a little later, is for a head that says nothing.
            var timed = fleet.withDeadlineAfter(options.deadlineMs() + 5_000L, TimeUnit.MILLISECONDS);
            return new Generation(timed, request, channel::resetConnectBackoff).read(new Printer());
        } finally {
            finish(sessionId);
        }
    }

    /** Prints tokens, and cancels when there are enough. */
    private final class Printer implements Consumer<GenerationEvent> {
        private String generationId = "";
        private int count = 0;

        @Override
        public void accept(GenerationEvent event) {
            switch (event.getEventCase()) {
                case ACCEPTED -> generationId = event.getAccepted().getGenerationId();
                case STARTED -> System.err.println("started on " + event.getStarted().getNode());
                case MOVED -> System.err.println(
                        "moved from " + event.getMoved().getFromNode() + " to " + event.getMoved().getToNode());
                case TOKENS -> {
                    int before = count;
                    List<Integer> ids = event.getTokens().getTokenIdsList();
                    ids.forEach(token -> System.out.println(Integer.toUnsignedString(token)));
                    count += ids.size();
                    if (before < options.cancelAfter() && count >= options.cancelAfter()) {
                        cancel();
                    }
                }
                default -> {}
            }
        }

        /** The stream goes on to its end, which then is CANCELLED. */
        private void cancel() {
            try {
                fleet.cancelGeneration(
                        CancelGenerationRequest.newBuilder().setGenerationId(generationId).build());
            } catch (StatusRuntimeException error) {
                System.err.println(Refusal.of(error));
            }
        }
    }

    /** Frees what the session holds; left alone, it would expire. */
    private void finish(String sessionId) {
        try {
            fleet.finishSession(FinishSessionRequest.newBuilder().setSessionId(sessionId).build());
        } catch (StatusRuntimeException error) {
            System.err.println(Refusal.of(error));
        }
    }

    /** Prints how it ended and gives the exit code. */
    private int runAndTell() throws InterruptedException {
        Finished finished;
        try {
            finished = run();
        } catch (StatusRuntimeException error) {
            Refusal said = Refusal.of(error);
            System.err.println(said);
            return said.reason().isEmpty() ? NOT_REACHED : REFUSED;
        }
        String reason = finished.getReason().name().replace("FINISH_REASON_", "");
        System.err.println("finished: " + reason + ", " + finished.getOutputTokens() + " tokens");
        return switch (finished.getReason()) {
            case FINISH_REASON_EOS, FINISH_REASON_STOP, FINISH_REASON_LENGTH -> WHOLE;
            case FINISH_REASON_ERROR -> {
                System.err.println(finished.getError().getReason() + ": " + finished.getError().getMessage());
                yield ENDED_TOO_EARLY;
            }
            default -> ENDED_TOO_EARLY;
        };
    }
}
