package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "fleet.example/node/gen/fleet/v1"
)

const (
	version        = 1
	window         = 4096
	vocabulary     = 32000
	maxSessions    = 1024
	maxTombstones  = 65536
	maxLeases      = 256
	maxKnown       = 1024
	maxIDChars     = 128
	defaultLease   = time.Minute
	defaultPeriod  = 2 * time.Second
	shortestPeriod = 20 * time.Millisecond
)

// owner is what a lease covers: one term of one head of one fleet.
type owner struct {
	fleet, head string
	term        uint32
}

// errStopped ends the sending of a run that the rules have stopped.
var errStopped = errors.New("stopped")

type tombstone struct {
	epoch uint64
	until time.Time
}

// node keeps the rules. Everything is judged and done under one lock, leases before anything else.
type node struct {
	pb.UnimplementedNodeServiceServer
	identity, incarnation string
	model                 *pb.Model
	gate                  *gate
	engine                *engine
	started               time.Time

	mutex      sync.Mutex
	sessions   map[string]*session
	leases     map[owner]time.Time
	tombstones map[string]tombstone
	highest    uint64 // of any fleet: telling more than was seen does no harm
}

func newNode(identity, incarnation, model string, lanes int, rate float64, gate *gate) *node {
	served := &pb.Model{Name: model, Revision: "toy-1", VocabSize: vocabulary, MaxContextTokens: window}
	return &node{
		identity: identity, incarnation: incarnation, model: served, gate: gate, started: time.Now(),
		engine: newEngine(lanes, rate), sessions: map[string]*session{}, leases: map[owner]time.Time{},
		tombstones: map[string]tombstone{},
	}
}

func (n *node) Handshake(_ context.Context, request *pb.HandshakeRequest) (*pb.HandshakeResponse, error) {
	if request.MinVersion > version || request.MaxVersion < version {
		return nil, status.Errorf(codes.FailedPrecondition, "this node speaks version %d", version)
	}
	answer := &pb.HandshakeResponse{
		Version: version, Identity: n.identity, Incarnation: n.incarnation, Models: []*pb.Model{n.model},
		MaxMessageBytes: maxMessageBytes,
	}
	if n.gate != nil {
		if len(request.Nonce) != nonceBytes {
			return nil, status.Error(codes.Unauthenticated, "this node has a fleet token, the head none")
		}
		answer.Nonce, answer.Proof = n.gate.nonce, n.gate.mac("fleet.v1 node plain", request.Nonce)
	}
	defer n.lock()()
	for of := range n.leases {
		if of.fleet != request.FleetId {
			return nil, status.Errorf(codes.FailedPrecondition, "this node works for fleet %q", of.fleet)
		}
	}
	answer.HighestEpoch = n.highest
	answer.Report = n.report(owner{request.FleetId, request.HeadId, request.Term})
	return answer, nil
}

func (n *node) Assign(_ context.Context, request *pb.AssignRequest) (*pb.AssignResponse, error) {
	defer n.lock()()
	return &pb.AssignResponse{Refusal: n.assign(request)}, nil
}

func (n *node) assign(request *pb.AssignRequest) *pb.Refusal {
	held, print := n.sessions[request.SessionId], fingerprint(request)
	if held != nil && held.epoch == request.Epoch {
		if refusal, again := held.judge(request.Epoch, request.CommandId, print); again || refusal != nil {
			return refusal
		}
		return stale(held.epoch)
	}
	current := n.tombstones[request.SessionId].epoch
	if held != nil {
		current = held.epoch
	}
	lease := time.Duration(request.LeaseMs) * time.Millisecond
	if lease == 0 {
		lease = defaultLease
	}
	of := owner{request.FleetId, request.HeadId, uint32(request.Epoch >> 32)}
	switch {
	case request.Epoch <= current:
		return stale(current)
	case len(request.SessionId) == 0 || len(request.SessionId) > maxIDChars:
		return refuse(pb.RefusalCode_REFUSAL_CODE_CONSTRAINT, "a session id has 1 to 128 characters")
	case request.Model != n.model.Name:
		return refuse(pb.RefusalCode_REFUSAL_CODE_CONSTRAINT, "no such model")
	case request.ModelRevision != "" && request.ModelRevision != n.model.Revision:
		return refuse(pb.RefusalCode_REFUSAL_CODE_CONSTRAINT, "no such revision")
	case held != nil && !held.fenced && held.owner.fleet != request.FleetId:
		return refuse(pb.RefusalCode_REFUSAL_CODE_BUSY, "the id belongs to a session of another fleet")
	case held == nil && len(n.sessions) >= maxSessions:
		return refuse(pb.RefusalCode_REFUSAL_CODE_BUSY, "every session's place is taken")
	case n.leases[of].IsZero() && len(n.leases) >= maxLeases:
		return refuse(pb.RefusalCode_REFUSAL_CODE_BUSY, "too many heads hold a lease")
	}
	if held != nil {
		held.stop(stale(request.Epoch))
	}
	delete(n.tombstones, request.SessionId)
	fresh := &session{
		epoch: request.Epoch, owner: of, lease: lease, known: map[string]bool{}, runs: map[string]*run{},
	}
	n.sessions[request.SessionId] = fresh
	n.leases[of] = time.Now().Add(lease)
	n.highest = max(n.highest, request.Epoch)
	return fresh.remember(request.CommandId, print, nil)
}

func (n *node) Append(_ context.Context, request *pb.AppendRequest) (*pb.AppendResponse, error) {
	defer n.lock()()
	held, print := n.sessions[request.SessionId], fingerprint(request)
	refusal, again := held.judge(request.Epoch, request.CommandId, print)
	if refusal == nil && !again {
		refusal = held.remember(request.CommandId, print, n.append(held, request))
	}
	if refusal != nil {
		return &pb.AppendResponse{Refusal: refusal}, nil
	}
	return &pb.AppendResponse{ContextLength: uint64(len(held.context))}, nil
}

func (n *node) append(held *session, request *pb.AppendRequest) *pb.Refusal {
	if request.BaseLength > uint64(len(held.context)) {
		return mismatch(held)
	}
	for _, token := range request.TokenIds {
		if token >= vocabulary {
			return refuse(pb.RefusalCode_REFUSAL_CODE_CONSTRAINT, "a token is outside of the vocabulary")
		}
	}
	if int(request.BaseLength)+len(request.TokenIds) > window {
		return tooLong()
	}
	kept := held.context[:request.BaseLength:request.BaseLength]
	held.context = append(kept, request.TokenIds...)
	return nil
}

// Generate streams a run. Whether the call ends or the run does: the other ends with it.
func (n *node) Generate(request *pb.NodeServiceGenerateRequest, stream pb.NodeService_GenerateServer) error {
	run, refusal := n.start(request)
	if refusal != nil {
		return stream.Send(&pb.NodeServiceGenerateResponse{Epoch: request.Epoch, FirstIndex: request.FirstIndex, Refusal: refusal})
	}
	defer n.ended(request, run)
	err := n.engine.generate(stream.Context(), run, func(message *pb.NodeServiceGenerateResponse) error {
		n.lock()() // the lease is judged before anything is sent
		message.Epoch = request.Epoch
		if refusal := run.refused(); refusal != nil {
			last := &pb.NodeServiceGenerateResponse{Epoch: message.Epoch, FirstIndex: message.FirstIndex, Refusal: refusal}
			return errors.Join(errStopped, stream.Send(last))
		}
		return stream.Send(message)
	})
	if errors.Is(err, errStopped) {
		return nil // its last message has said so
	}
	return err
}

func (n *node) start(request *pb.NodeServiceGenerateRequest) (*run, *pb.Refusal) {
	defer n.lock()()
	held, print := n.sessions[request.SessionId], fingerprint(request)
	refusal, again := held.judge(request.Epoch, request.CommandId, print)
	if refusal == nil && again {
		refusal = refuse(pb.RefusalCode_REFUSAL_CODE_REPLAYED, "the generation was started before")
	}
	if refusal != nil {
		return nil, refusal
	}
	refusal = generateRefusal(held, request)
	if refusal == nil && n.engine.full() {
		refusal = &pb.Refusal{Code: pb.RefusalCode_REFUSAL_CODE_BUSY, RetryAfterMs: 100}
	}
	if held.remember(request.CommandId, print, refusal) != nil {
		return nil, refusal
	}
	prompt := append(append([]uint32{}, held.context...), request.PrefixTokenIds...)
	run := newRun(held.owner, prompt, request)
	held.learn(request.GenerationId)
	held.runs[request.GenerationId] = run
	return run, nil
}

func (n *node) ended(request *pb.NodeServiceGenerateRequest, run *run) {
	defer n.lock()()
	if held := n.sessions[request.SessionId]; held != nil && held.runs[request.GenerationId] == run {
		delete(held.runs, request.GenerationId)
	}
}

func (n *node) Cancel(_ context.Context, request *pb.CancelRequest) (*pb.CancelResponse, error) {
	defer n.lock()()
	held := n.sessions[request.SessionId]
	if refusal := held.refusal(request.Epoch); refusal != nil {
		return &pb.CancelResponse{Refusal: refusal}, nil
	}
	run := held.runs[request.GenerationId]
	held.learn(request.GenerationId) // one that comes only now will not start
	return &pb.CancelResponse{WasRunning: run != nil && run.cancel()}, nil
}

func (n *node) Revoke(_ context.Context, request *pb.RevokeRequest) (*pb.RevokeResponse, error) {
	defer n.lock()()
	held := n.sessions[request.SessionId]
	if held != nil && held.epoch > request.Epoch {
		return &pb.RevokeResponse{Refusal: stale(held.epoch)}, nil
	}
	lease := defaultLease
	if held != nil {
		lease = held.lease
	}
	n.bury(request.SessionId, request.Epoch, time.Now().Add(2*lease))
	n.highest = max(n.highest, request.Epoch)
	if held == nil {
		return &pb.RevokeResponse{Refusal: unknown()}, nil
	}
	held.stop(stale(request.Epoch))
	delete(n.sessions, request.SessionId)
	return &pb.RevokeResponse{}, nil
}

// bury bars epochs; a tombstone that stands is never lowered or shortened.
func (n *node) bury(sessionID string, epoch uint64, until time.Time) {
	old, stands := n.tombstones[sessionID]
	if !stands && len(n.tombstones) >= maxTombstones {
		first := sessionID
		for id, stone := range n.tombstones {
			if first == sessionID || stone.until.Before(n.tombstones[first].until) {
				first = id
			}
		}
		delete(n.tombstones, first)
	}
	if old.until.After(until) {
		until = old.until
	}
	n.tombstones[sessionID] = tombstone{max(epoch, old.epoch), until}
}

func (n *node) RenewLease(_ context.Context, request *pb.RenewLeaseRequest) (*pb.RenewLeaseResponse, error) {
	defer n.lock()()
	of := owner{request.FleetId, request.HeadId, request.Term}
	_, runs := n.leases[of]
	if runs {
		n.leases[of] = time.Now().Add(time.Duration(request.LeaseMs) * time.Millisecond)
		n.expire(time.Now())
	}
	answer := &pb.RenewLeaseResponse{Renewed: runs && request.LeaseMs > 0}
	for _, held := range n.sessions {
		if held.owner == of && !held.fenced {
			answer.LiveSessions++
		}
	}
	return answer, nil
}

func (n *node) WatchStatus(request *pb.WatchStatusRequest, stream pb.NodeService_WatchStatusServer) error {
	period := time.Duration(request.PeriodMs) * time.Millisecond
	if period == 0 {
		period = defaultPeriod
	}
	ticker := time.NewTicker(max(period, shortestPeriod))
	defer ticker.Stop()
	for {
		unlock := n.lock()
		report := n.report(owner{request.FleetId, request.HeadId, request.Term})
		unlock()
		if err := stream.Send(&pb.WatchStatusResponse{Report: report}); err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (n *node) report(of owner) *pb.CapacityReport {
	report := n.engine.report(of)
	report.MaxSessions, report.MaxContextTokens = maxSessions, window
	report.SampledAtMs = uint64(time.Since(n.started).Milliseconds())
	for _, held := range n.sessions {
		if !held.fenced {
			report.ActiveSessions++
		}
	}
	return report
}

// ------------------------------------------------------------------------------------------------- leases

// lock takes the lock and judges the leases; what it returns gives the lock back.
func (n *node) lock() func() {
	n.mutex.Lock()
	n.expire(time.Now())
	return n.mutex.Unlock
}

func (n *node) expire(now time.Time) {
	for of, ends := range n.leases {
		if ends.After(now) {
			continue
		}
		delete(n.leases, of)
		for _, held := range n.sessions {
			if held.owner == of && !held.fenced {
				held.fence(now)
			}
		}
	}
	for id, held := range n.sessions {
		if held.fenced && !held.forgotten.After(now) {
			delete(n.sessions, id)
		}
	}
	for id, stone := range n.tombstones {
		if !stone.until.After(now) {
			delete(n.tombstones, id)
		}
	}
}
