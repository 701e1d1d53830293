package main

import (
	"context"
	"sync"
	"time"

	pb "fleet.example/node/gen/fleet/v1"
)

const maxQueued = 1024

// run is one generation on its way. Whoever ends it first wins: a cancel, or a refusal by the rules.
type run struct {
	owner   owner
	prompt  []uint32
	request *pb.NodeServiceGenerateRequest
	over    chan struct{}

	mutex     sync.Mutex
	refusal   *pb.Refusal
	cancelled bool
}

func newRun(of owner, prompt []uint32, request *pb.NodeServiceGenerateRequest) *run {
	return &run{owner: of, prompt: prompt, request: request, over: make(chan struct{})}
}

func (r *run) cancel() bool { return r.end(nil) }

func (r *run) stop(why *pb.Refusal) { r.end(why) }

func (r *run) end(why *pb.Refusal) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.cancelled || r.refusal != nil {
		return false
	}
	r.cancelled, r.refusal = why == nil, why
	close(r.over)
	return true
}

func (r *run) refused() *pb.Refusal {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.refusal
}

// engine runs as many generations at a time as it has lanes; the others wait.
type engine struct {
	lanes chan struct{}
	step  time.Duration

	mutex           sync.Mutex
	running, queued map[*run]bool
}

func newEngine(lanes int, rate float64) *engine {
	step := time.Duration(float64(time.Second) / rate)
	return &engine{lanes: make(chan struct{}, lanes), step: step, running: map[*run]bool{}, queued: map[*run]bool{}}
}

// generate sends a run message by message: its phases, its tokens, its end. ctx ends with the call.
func (e *engine) generate(ctx context.Context, r *run, send func(*pb.NodeServiceGenerateResponse) error) error {
	index, left := r.request.FirstIndex, min(int(r.request.MaxNewTokens), window-len(r.prompt))
	say := func(message *pb.NodeServiceGenerateResponse) error {
		message.FirstIndex = index
		return send(message)
	}
	end := func(finish pb.FinishReason) error {
		return say(&pb.NodeServiceGenerateResponse{Finish: finish})
	}
	if left == 0 {
		return end(pb.FinishReason_FINISH_REASON_LENGTH)
	}
	var wall <-chan time.Time
	if r.request.MaxWallMs > 0 {
		timer := time.NewTimer(time.Duration(r.request.MaxWallMs) * time.Millisecond)
		defer timer.Stop()
		wall = timer.C
	}
	release, finish := e.lane(ctx, r, wall, func() error {
		return say(&pb.NodeServiceGenerateResponse{Phase: pb.GenerationPhase_GENERATION_PHASE_QUEUED})
	})
	if release == nil {
		return end(finish)
	}
	defer release()
	if err := say(&pb.NodeServiceGenerateResponse{Phase: pb.GenerationPhase_GENERATION_PHASE_PREFILL}); err != nil {
		return err
	}
	state := seed(r.request.Sampling, r.prompt)
	ticker := time.NewTicker(e.step)
	defer ticker.Stop()
	for {
		select {
		case <-r.over:
			return end(pb.FinishReason_FINISH_REASON_CANCELLED)
		case <-wall:
			return end(pb.FinishReason_FINISH_REASON_WALL_CLOCK)
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		token := next(&state)
		message := &pb.NodeServiceGenerateResponse{TokenIds: []uint32{token}}
		if index == r.request.FirstIndex {
			message.Phase = pb.GenerationPhase_GENERATION_PHASE_DECODE
		}
		if left--; left == 0 {
			message.Finish = pb.FinishReason_FINISH_REASON_LENGTH
			return say(message)
		}
		if err := say(message); err != nil {
			return err
		}
		index++
	}
}

// lane waits for one, and says so where it must. Without one: how the run ended meanwhile.
func (e *engine) lane(ctx context.Context, r *run, wall <-chan time.Time, wait func() error) (func(), pb.FinishReason) {
	take := func() func() {
		e.move(r, e.queued, e.running)
		return func() {
			e.move(r, e.running, nil)
			<-e.lanes
		}
	}
	select {
	case e.lanes <- struct{}{}:
		return take(), 0
	default:
	}
	e.move(r, nil, e.queued)
	defer e.move(r, e.queued, nil)
	if wait() != nil {
		return nil, pb.FinishReason_FINISH_REASON_CANCELLED
	}
	select {
	case e.lanes <- struct{}{}:
		return take(), 0
	case <-wall:
		return nil, pb.FinishReason_FINISH_REASON_WALL_CLOCK
	case <-r.over:
	case <-ctx.Done():
	}
	return nil, pb.FinishReason_FINISH_REASON_CANCELLED
}

func (e *engine) move(r *run, from, to map[*run]bool) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	delete(from, r)
	if to != nil {
		to[r] = true
	}
}

func (e *engine) full() bool {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	return len(e.queued) >= maxQueued
}

func (e *engine) report(of owner) *pb.CapacityReport {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	report := &pb.CapacityReport{
		MaxLanes: uint32(cap(e.lanes)), LanesActive: uint32(len(e.running)), QueueDepth: uint32(len(e.queued)),
	}
	for run := range e.running {
		if run.owner == of {
			report.OwnLanesActive++
		}
	}
	for run := range e.queued {
		if run.owner == of {
			report.OwnQueueDepth++
		}
	}
	return report
}

// The toy: a token follows from the seed and all before it, so that a continued answer is the same answer.
func seed(sampling *pb.SamplingParams, prompt []uint32) uint64 {
	state := uint64(14695981039346656037)
	if sampling.GetTemperature() > 0 {
		state ^= sampling.GetSeed()
	}
	for _, token := range prompt {
		absorb(&state, token)
	}
	return state
}

func next(state *uint64) uint32 {
	token := uint32((*state >> 20) % vocabulary)
	absorb(state, token)
	return token
}

func absorb(state *uint64, token uint32) { *state = (*state ^ uint64(token)) * 1099511628211 }
