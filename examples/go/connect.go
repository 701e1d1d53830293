package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	_ "embed"
	"errors"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

// What is published beside the contract: timeouts, and which calls are tried again by gRPC itself.
//
//go:embed gen/service_config.json
var serviceConfig string

// connect gives a connection to a head: with TLS where there is a CA file, with a token on every call
// where there is a token file. It is made on the first call, and made anew when it breaks.
func connect(address, caFile, tokenFile string) (*grpc.ClientConn, error) {
	soon := backoff.DefaultConfig
	soon.MaxDelay = time.Second // a head that is back is noticed soon
	options := []grpc.DialOption{
		grpc.WithDefaultServiceConfig(serviceConfig),
		// Tells a connection that has died in silence; without calls nothing is sent.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 15 * time.Second, Timeout: 5 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: soon, MinConnectTimeout: 10 * time.Second}),
	}
	if caFile == "" {
		return grpc.NewClient(address, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errors.New(caFile + " holds no certificate")
	}
	secure := credentials.NewTLS(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})
	options = append(options, grpc.WithTransportCredentials(secure))
	if tokenFile != "" {
		text, err := os.ReadFile(tokenFile)
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithPerRPCCredentials(token(strings.TrimSpace(string(text)))))
	}
	return grpc.NewClient(address, options...)
}

// token is a bearer token; gRPC sends it over TLS only.
type token string

func (t token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(t)}, nil
}

func (token) RequireTransportSecurity() bool { return true }
