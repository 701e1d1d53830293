// A minimal node of a fleet: the node rules over plain calls, and a toy in place of a model.
package main

import (
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	pb "fleet.example/node/gen/fleet/v1"
)

//go:generate buf generate

const maxMessageBytes = 16 << 20

func main() {
	listen := flag.String("listen", "127.0.0.1:8454", "serve heads on `HOST:PORT`; port 0 picks one")
	identity := flag.String("identity", "go-node", "the node's stable `NAME`")
	model := flag.String("model", "toy", "`NAME` of its model")
	lanes := flag.Int("lanes", 4, "generations at a time, `N`")
	rate := flag.Float64("rate", 200, "tokens per second of each generation, `N`")
	tokenFile := flag.String("token-file", "", "`FILE` with the fleet token that heads must know")
	certFile := flag.String("tls-cert", "", "`FILE` with the certificate to show; without it there is no TLS")
	keyFile := flag.String("tls-key", "", "`FILE` with its key")
	flag.Parse()

	var options []grpc.ServerOption
	if *certFile != "" {
		pair, err := tls.LoadX509KeyPair(*certFile, *keyFile)
		check(err)
		config := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
	}
	options = append(options, grpc.MaxRecvMsgSize(maxMessageBytes), keepalivePolicy)
	if *tokenFile != "" {
		text, err := os.ReadFile(*tokenFile)
		check(err)
		key, err := hex.DecodeString(strings.TrimSpace(string(text)))
		check(err)
		gate := newGate(key)
		options = append(options, grpc.UnaryInterceptor(gate.unary), grpc.StreamInterceptor(gate.stream))
		serve(*listen, options, newNode(*identity, rand.Text(), *model, *lanes, *rate, gate))
		return
	}
	serve(*listen, options, newNode(*identity, rand.Text(), *model, *lanes, *rate, nil))
}

// serve runs until SIGINT or SIGTERM. Its first line tells where, when it is ready.
func serve(address string, options []grpc.ServerOption, n *node) {
	listener, err := net.Listen("tcp", address)
	check(err)
	server := grpc.NewServer(options...)
	pb.RegisterNodeServiceServer(server, n)
	fmt.Printf("go-node: %s on %s\n", n.identity, listener.Addr())
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-asked
		server.Stop()
	}()
	check(server.Serve(listener))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "go-node:", err)
		os.Exit(1)
	}
}
