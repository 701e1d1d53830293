package main

import (
	"encoding/binary"
	"hash/crc32"
	"hash/fnv"
	"time"

	"google.golang.org/protobuf/proto"

	pb "fleet.example/node/gen/fleet/v1"
)

// session is the record of one session under one epoch. The answers to a command sent again are kept of the
// last one.
type session struct {
	epoch      uint64
	owner      owner
	lease      time.Duration
	context    []uint32
	fenced     bool
	forgotten  time.Time // when a fenced one may go
	lastID     uint64
	lastPrint  uint64
	lastAnswer *pb.Refusal
	known      map[string]bool // generations: none of them starts a second run
	runs       map[string]*run
}

// refusal is what stands against any command under that epoch.
func (s *session) refusal(epoch uint64) *pb.Refusal {
	switch {
	case s == nil:
		return unknown()
	case s.epoch != epoch:
		return stale(s.epoch)
	case s.fenced:
		return refuse(pb.RefusalCode_REFUSAL_CODE_FENCED, "the lease ran out")
	}
	return nil
}

// judge refuses a command, or finds the last one sent again and gives its answer.
func (s *session) judge(epoch, id, print uint64) (refusal *pb.Refusal, again bool) {
	if refusal := s.refusal(epoch); refusal != nil {
		return refusal, false
	}
	if id < s.lastID || id == s.lastID && print != s.lastPrint {
		return refuse(pb.RefusalCode_REFUSAL_CODE_REPLAYED, "a command with this id or a higher one was executed"), false
	}
	if id == s.lastID {
		return s.lastAnswer, true
	}
	return nil, false
}

func (s *session) remember(id, print uint64, answer *pb.Refusal) *pb.Refusal {
	s.lastID, s.lastPrint, s.lastAnswer = id, print, answer
	return answer
}

// learn keeps a generation's id. Of too many one makes room: its command id is too low by then.
func (s *session) learn(generationID string) {
	if len(s.known) >= maxKnown {
		for some := range s.known {
			delete(s.known, some)
			break
		}
	}
	s.known[generationID] = true
}

func (s *session) fence(now time.Time) {
	s.stop(refuse(pb.RefusalCode_REFUSAL_CODE_FENCED, "the lease ran out"))
	s.fenced, s.context, s.known, s.forgotten = true, nil, nil, now.Add(2*s.lease)
}

func (s *session) stop(why *pb.Refusal) {
	for _, run := range s.runs {
		run.stop(why)
	}
	s.runs = map[string]*run{}
}

func generateRefusal(held *session, request *pb.NodeServiceGenerateRequest) *pb.Refusal {
	switch {
	case held.known[request.GenerationId]:
		return refuse(pb.RefusalCode_REFUSAL_CODE_REPLAYED, "the generation is known")
	case request.ContextLength != uint64(len(held.context)) || request.ContextCrc32 != checksum(held.context):
		return mismatch(held)
	case len(request.GenerationId) == 0 || len(request.GenerationId) > maxIDChars:
		return refuse(pb.RefusalCode_REFUSAL_CODE_CONSTRAINT, "a generation id has 1 to 128 characters")
	case int(request.FirstIndex) != len(request.PrefixTokenIds):
		return refuse(pb.RefusalCode_REFUSAL_CODE_CONSTRAINT, "first_index is the number of prefix tokens")
	case len(held.context)+len(request.PrefixTokenIds) > window:
		return tooLong()
	}
	return nil
}

func refuse(code pb.RefusalCode, detail string) *pb.Refusal {
	return &pb.Refusal{Code: code, Detail: detail}
}

func stale(current uint64) *pb.Refusal {
	return &pb.Refusal{Code: pb.RefusalCode_REFUSAL_CODE_STALE_EPOCH, CurrentEpoch: current}
}

func unknown() *pb.Refusal { return &pb.Refusal{Code: pb.RefusalCode_REFUSAL_CODE_UNKNOWN_SESSION} }

func mismatch(held *session) *pb.Refusal {
	return &pb.Refusal{Code: pb.RefusalCode_REFUSAL_CODE_CONTEXT_MISMATCH, ContextLength: uint64(len(held.context))}
}

func tooLong() *pb.Refusal {
	return &pb.Refusal{Code: pb.RefusalCode_REFUSAL_CODE_CONTEXT_TOO_LONG, MaxContextTokens: window}
}

// checksum is the CRC-32 of the ids as little-endian words of 32 bits.
func checksum(tokens []uint32) uint32 {
	words := make([]byte, 0, 4*len(tokens))
	for _, token := range tokens {
		words = binary.LittleEndian.AppendUint32(words, token)
	}
	return crc32.ChecksumIEEE(words)
}

// fingerprint tells a command sent again from another one under the same id.
func fingerprint(command proto.Message) uint64 {
	bytes, _ := proto.MarshalOptions{Deterministic: true}.Marshal(command)
	hash := fnv.New64a()
	hash.Write(bytes)
	return hash.Sum64()
}
