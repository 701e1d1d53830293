package main

import (
	"context"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "fleet.example/client/gen/fleet/v1"
)

// How long a generation waits for its reader to come back, and its reader tries to.
const grace = 10 * time.Second

// generate reads one generation to its end, whatever becomes of the connection and the head: `on` gets every
// event but the last, every token once and in order; the last one is returned.
//
// For that the request needs a request id, and grace as its disconnect_grace_ms. Where the head lost tokens
// that it gave, the error's reason is DATA_LOSS: those from its metadata's nextIndex on are to be dropped.
func generate(
	ctx context.Context, fleet pb.FleetServiceClient, request *pb.GenerateRequest, on func(*pb.GenerationEvent),
) (*pb.Finished, error) {
	// Closing the stream we leave tells the head that we left.
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	place := &pb.AttachGenerationRequest{} // takes it up behind all that came
	var lostAt time.Time
	for wait := time.Duration(0); ; {
		next, err := open(ctx, fleet, request, place)
		for err == nil {
			var event *pb.GenerationEvent
			if event, err = next(); err != nil {
				break
			}
			lostAt, wait = time.Time{}, 0
			place.Branch = event.GetBranch()
			switch event := event.GetEvent().(type) {
			case *pb.GenerationEvent_Accepted:
				place.GenerationId = event.Accepted.GetGenerationId()
			case *pb.GenerationEvent_Tokens:
				place.FromIndex = event.Tokens.GetFirstIndex() + uint32(len(event.Tokens.GetTokenIds()))
			case *pb.GenerationEvent_Finished:
				return event.Finished, nil
			}
			on(event)
		}
		if lostAt.IsZero() {
			lostAt = time.Now()
		}
		if ctx.Err() != nil || !decode(err).connectionLost() || time.Since(lostAt) > grace {
			return nil, err
		}
		note("connection lost, going on at %d", place.GetFromIndex())
		select {
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		case <-time.After(time.Duration(float64(wait) * (0.5 + rand.Float64()/2))):
		}
		wait = min(max(100*time.Millisecond, 2*wait), time.Second)
	}
}

// open asks for the generation, or, once it is known, takes it up at a place; gives what reads its events.
func open(
	ctx context.Context, fleet pb.FleetServiceClient, request *pb.GenerateRequest, place *pb.AttachGenerationRequest,
) (func() (*pb.GenerationEvent, error), error) {
	if place.GetGenerationId() == "" {
		return events(fleet.Generate(ctx, request))
	}
	return events(fleet.AttachGeneration(ctx, place))
}

// events reads both kinds of stream.
func events[R interface{ GetEvent() *pb.GenerationEvent }](
	stream interface{ Recv() (R, error) }, err error,
) (func() (*pb.GenerationEvent, error), error) {
	return func() (*pb.GenerationEvent, error) {
		response, err := stream.Recv()
		if err == io.EOF { // without `finished`: something between us and the head ended it
			err = status.Error(codes.Unavailable, "the stream ended before the generation did")
		}
		return response.GetEvent(), err
	}, err
}
