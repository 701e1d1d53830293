package main

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "fleet.example/node/gen/fleet/v1"
)

// A head looks every few seconds whether the connection lives; Go's server would close it for that.
var keepalivePolicy = grpc.KeepaliveEnforcementPolicy(
	keepalive.EnforcementPolicy{MinTime: 2 * time.Second, PermitWithoutStream: true})

const nonceBytes = 32

var errNoProof = status.Error(codes.Unauthenticated, "this call lacks the proof of this node's fleet token")

// gate lets only heads in that prove to know the fleet token. Its nonce is that of the whole process, as a
// plain call does not know its connection.
type gate struct{ key, nonce []byte }

func newGate(key []byte) *gate {
	nonce := make([]byte, nonceBytes)
	rand.Read(nonce)
	return &gate{key, nonce}
}

func (g *gate) mac(label string, headNonce []byte) []byte {
	mac := hmac.New(sha256.New, g.key)
	mac.Write([]byte(label))
	mac.Write(headNonce)
	mac.Write(g.nonce)
	return mac.Sum(nil)
}

func (g *gate) admit(ctx context.Context) error {
	values := metadata.ValueFromIncomingContext(ctx, "fleet-proof-bin")
	if len(values) != 1 || len(values[0]) != nonceBytes+sha256.Size {
		return errNoProof
	}
	given := []byte(values[0])
	if !hmac.Equal(given[nonceBytes:], g.mac("fleet.v1 head plain", given[:nonceBytes])) {
		return errNoProof
	}
	return nil
}

func (g *gate) unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	// The handshake is where the head gets what it makes its proof of.
	if info.FullMethod != pb.NodeService_Handshake_FullMethodName {
		if err := g.admit(ctx); err != nil {
			return nil, err
		}
	}
	return handle(ctx, request)
}

func (g *gate) stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := g.admit(stream.Context()); err != nil {
		return err
	}
	return handle(server, stream)
}
