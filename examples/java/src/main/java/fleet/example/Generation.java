package fleet.example;

import fleet.v1.FleetServiceGrpc.FleetServiceBlockingStub;
import fleet.v1.FleetServiceOuterClass.AttachGenerationRequest;
import fleet.v1.FleetServiceOuterClass.AttachGenerationResponse;
import fleet.v1.FleetServiceOuterClass.Finished;
import fleet.v1.FleetServiceOuterClass.GenerateRequest;
import fleet.v1.FleetServiceOuterClass.GenerateResponse;
import fleet.v1.FleetServiceOuterClass.GenerationEvent;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Consumer;
import java.util.function.Function;

/** Reads one generation to its end, whatever becomes of the connection and the head. */
final class Generation {
    /** How long a generation waits for its reader to come back, and its reader tries to. */
    static final int GRACE_MS = 10_000;

    private final FleetServiceBlockingStub fleet;
    private final GenerateRequest request;
    private final Runnable connectAtOnce;

    /** Takes it up behind all that came. */
    private final AttachGenerationRequest.Builder place = AttachGenerationRequest.newBuilder();

    /**
     * For going on, the request needs a request id, and GRACE_MS as its disconnect_grace_ms.
     *
     * @param connectAtOnce tells the channel not to wait longer each time before it connects
     */
    Generation(FleetServiceBlockingStub fleet, GenerateRequest request, Runnable connectAtOnce) {
        this.fleet = fleet;
        this.request = request;
        this.connectAtOnce = connectAtOnce;
    }

    /**
     * Gives `on` every event but the last, every token once and in order; the last one is returned.
     *
     * <p>Where the head lost tokens that it gave, the error's reason is DATA_LOSS: those from its metadata's
     * nextIndex on are to be dropped.
     */
    Finished read(Consumer<GenerationEvent> on) throws InterruptedException {
        // Closing the stream we leave tells the head that we left.
        Context.CancellableContext context = Context.current().withCancellation();
        Context before = context.attach();
        try {
            return follow(on);
        } finally {
            context.detach(before);
            context.close();
        }
    }

    private Finished follow(Consumer<GenerationEvent> on) throws InterruptedException {
        long lostAt = 0;
        long waitMs = 0;
        while (true) {
            StatusRuntimeException error;
            try {
                Iterator<GenerationEvent> events = open();
                while (events.hasNext()) {
                    GenerationEvent event = events.next();
                    lostAt = 0;
                    waitMs = 0;
                    place.setBranch(event.getBranch());
                    switch (event.getEventCase()) {
                        case ACCEPTED -> place.setGenerationId(event.getAccepted().getGenerationId());
                        case TOKENS -> place.setFromIndex(
                                event.getTokens().getFirstIndex() + event.getTokens().getTokenIdsCount());
                        case FINISHED -> {
                            return event.getFinished();
                        }
                        default -> {}
                    }
                    on.accept(event);
                }
                error = Status.UNAVAILABLE
                        .withDescription("the stream ended before the generation did")
                        .asRuntimeException();
            } catch (StatusRuntimeException thrown) {
                error = thrown;
            }
            long now = System.nanoTime();
            lostAt = lostAt == 0 ? now : lostAt;
            if (Context.current().isCancelled()
                    || !Refusal.of(error).connectionLost()
                    || now - lostAt > GRACE_MS * 1_000_000L) {
                throw error;
            }
            System.err.println("connection lost, going on at " + place.getFromIndex());
            Thread.sleep((long) (waitMs * ThreadLocalRandom.current().nextDouble(0.5, 1)));
            connectAtOnce.run();
            waitMs = Math.min(Math.max(100, 2 * waitMs), 1000);
        }
    }

    /** Asks for the generation, or, once it is known, takes it up. */
    private Iterator<GenerationEvent> open() {
        if (place.getGenerationId().isEmpty()) {
            return events(fleet.generate(request), GenerateResponse::getEvent);
        }
        return events(fleet.attachGeneration(place.build()), AttachGenerationResponse::getEvent);
    }

    private static <R> Iterator<GenerationEvent> events(
            Iterator<R> responses, Function<R, GenerationEvent> event) {
        return new Iterator<>() {
            @Override
            public boolean hasNext() {
                return responses.hasNext();
            }

            @Override
            public GenerationEvent next() {
                return event.apply(responses.next());
            }
        };
    }
}
