// An example client of a fleet head: a session, a prompt, an answer that survives what fails on its way.
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	pb "fleet.example/client/gen/fleet/v1"
)

//go:generate buf generate
//go:generate cp ../../proto/fleet/v1/service_config.json gen/

// What the program ends with; wrong use is 2.
const (
	whole         = 0 // the answer ended by itself: EOS, STOP, LENGTH
	refused       = 1 // the head refused; its reason is printed
	wrongUse      = 2
	notReached    = 3 // the connection failed, or the deadline passed
	endedTooEarly = 4 // CANCELLED, WALL_CLOCK, ERROR; the tokens printed stand
)

func main() {
	address := flag.String("address", "127.0.0.1:8455", "the head, `HOST:PORT`")
	caFile := flag.String("ca", "", "`FILE` with the certificate authority to believe; without it there is no TLS")
	tokenFile := flag.String("token-file", "", "`FILE` with the token to show; needs --ca")
	model := flag.String("model", "demo", "`NAME` of the model")
	promptText := flag.String("prompt", "1,2,3", "token `IDS`, separated by commas")
	maxTokens := flag.Uint("max-tokens", 16, "most tokens to generate, `N`")
	deadline := flag.Float64("deadline", 60, "`SECONDS` the answer may take in all")
	cancelAfter := flag.Int("cancel-after", 0, "cancel once there are so many tokens, `N`; 0 = never")
	flag.Parse()

	prompt, err := parse(*promptText)
	if err != nil || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(wrongUse)
	}
	if *tokenFile != "" && *caFile == "" {
		note("--token-file needs --ca: a token is shown over TLS only")
		os.Exit(wrongUse)
	}
	connection, err := connect(*address, *caFile, *tokenFile)
	if err != nil {
		note("%v", err)
		os.Exit(wrongUse)
	}
	defer connection.Close()

	limit := time.Duration(*deadline * float64(time.Second))
	job := job{pb.NewFleetServiceClient(connection), *model, prompt, uint32(*maxTokens), limit, *cancelAfter}
	finished, err := job.run(context.Background())
	os.Exit(tell(finished, err))
}

type job struct {
	fleet       pb.FleetServiceClient
	model       string
	prompt      []uint32
	maxTokens   uint32
	limit       time.Duration
	cancelAfter int
}

// run opens a session, appends the prompt, prints the answer as it comes, and finishes the session.
func (j job) run(ctx context.Context) (*pb.Finished, error) {
	// With an id for each request, a call that is tried again is done once.
	id := rand.Text()
	created, err := j.fleet.CreateSession(ctx, &pb.CreateSessionRequest{
		Spec: &pb.SessionSpec{Model: j.model}, RequestId: id + "-create",
	})
	if err != nil {
		return nil, err
	}
	sessionID := created.GetSession().GetSessionId()
	defer j.finish(ctx, sessionID)

	_, err = j.fleet.AppendTokens(ctx, &pb.AppendTokensRequest{
		SessionId: sessionID, TokenIds: j.prompt, RequestId: id + "-append",
	})
	if err != nil {
		return nil, err
	}
	// The head keeps the time; our own deadline, a little later, is for a head that says nothing.
	ctx, stop := context.WithTimeout(ctx, j.limit+5*time.Second)
	defer stop()
	return generate(ctx, j.fleet, &pb.GenerateRequest{
		SessionId: sessionID,
		RequestId: id + "-generate",
		Spec: &pb.GenerationSpec{
			MaxNewTokens:      proto.Uint32(j.maxTokens),
			MaxWallMs:         proto.Uint32(uint32(j.limit.Milliseconds())),
			DisconnectGraceMs: proto.Uint32(uint32(grace.Milliseconds())),
		},
	}, j.printer(ctx))
}

// printer prints tokens, and cancels when there are enough.
func (j job) printer(ctx context.Context) func(*pb.GenerationEvent) {
	out, generationID, count := bufio.NewWriter(os.Stdout), "", 0
	return func(event *pb.GenerationEvent) {
		switch event := event.GetEvent().(type) {
		case *pb.GenerationEvent_Accepted:
			generationID = event.Accepted.GetGenerationId()
		case *pb.GenerationEvent_Started:
			note("started on %s", event.Started.GetNode())
		case *pb.GenerationEvent_Moved:
			note("moved from %s to %s", event.Moved.GetFromNode(), event.Moved.GetToNode())
		case *pb.GenerationEvent_Tokens:
			before := count
			for _, id := range event.Tokens.GetTokenIds() {
				fmt.Fprintln(out, id)
				count++
			}
			out.Flush()
			if before < j.cancelAfter && count >= j.cancelAfter {
				// The stream goes on to its end, which then is CANCELLED.
				_, err := j.fleet.CancelGeneration(ctx, &pb.CancelGenerationRequest{GenerationId: generationID})
				if err != nil {
					note("%s", decode(err))
				}
			}
		}
	}
}

// finish frees what the session holds; left alone, it would expire.
func (j job) finish(ctx context.Context, sessionID string) {
	if _, err := j.fleet.FinishSession(ctx, &pb.FinishSessionRequest{SessionId: sessionID}); err != nil {
		note("%s", decode(err))
	}
}

// tell prints how it ended and gives the exit code.
func tell(finished *pb.Finished, err error) int {
	if err != nil {
		said := decode(err)
		note("%s", said)
		if said.Reason == "" {
			return notReached
		}
		return refused
	}
	reason := strings.TrimPrefix(finished.GetReason().String(), "FINISH_REASON_")
	note("finished: %s, %d tokens", reason, finished.GetOutputTokens())
	switch finished.GetReason() {
	case pb.FinishReason_FINISH_REASON_EOS, pb.FinishReason_FINISH_REASON_STOP, pb.FinishReason_FINISH_REASON_LENGTH:
		return whole
	case pb.FinishReason_FINISH_REASON_ERROR:
		note("%s: %s", finished.GetError().GetReason(), finished.GetError().GetMessage())
	}
	return endedTooEarly
}

func note(format string, values ...any) { fmt.Fprintf(os.Stderr, format+"\n", values...) }

func parse(text string) ([]uint32, error) {
	var ids []uint32
	for part := range strings.SplitSeq(text, ",") {
		id, err := strconv.ParseUint(strings.TrimSpace(part), 10, 32)
		if err != nil {
			return nil, err
		}
		ids = append(ids, uint32(id))
	}
	return ids, nil
}
