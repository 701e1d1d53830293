package main

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// refusal is what a head says with an error. Branch on Reason, never on the message.
type refusal struct {
	Code       codes.Code
	Message    string
	Reason     string // empty where the head said nothing: the connection failed, or the deadline passed
	Metadata   map[string]string
	Violations []string
	RetryAfter time.Duration // 0 = asking again does not help
}

// decode takes the details out of the error of a call.
func decode(err error) refusal {
	state := status.Convert(err)
	said := refusal{Code: state.Code(), Message: state.Message()}
	for _, detail := range state.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			said.Reason, said.Metadata = detail.GetReason(), detail.GetMetadata()
		case *errdetails.RetryInfo:
			said.RetryAfter = detail.GetRetryDelay().AsDuration()
		case *errdetails.BadRequest:
			for _, each := range detail.GetFieldViolations() {
				said.Violations = append(said.Violations, each.GetField()+" "+each.GetDescription())
			}
		}
	}
	return said
}

// connectionLost tells that the connection failed or the head ends, and not the request.
func (r refusal) connectionLost() bool {
	switch r.Code {
	case codes.Unavailable, codes.Internal, codes.Unknown, codes.Canceled: // the last while the head ends
		return r.Reason == "" || r.Reason == "HEAD_DRAINING"
	}
	return false
}

func (r refusal) String() string {
	if r.Reason == "" {
		return fmt.Sprintf("failed: %s: %s", r.Code, r.Message)
	}
	lines := []string{fmt.Sprintf("refused: %s: %s", r.Reason, r.Message)}
	for key, value := range r.Metadata {
		lines = append(lines, fmt.Sprintf("  %s = %s", key, value))
	}
	for _, each := range r.Violations {
		lines = append(lines, "  "+each)
	}
	if r.RetryAfter > 0 {
		lines = append(lines, fmt.Sprintf("  try again in %.1f s", r.RetryAfter.Seconds()))
	}
	return strings.Join(lines, "\n")
}
