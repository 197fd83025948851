// A server of QUIC by quic-go. Its socket is descriptor 3, or the one that is named:
//
//	go_quic [DESCRIPTOR]
//
// The request is one line, `BYTES MS`. The answer is a line with the worker's number of process, and then as many bytes
// over as many milliseconds.
package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/quic-go/quic-go"
)

// Makes connection IDs that carry the worker's number, by the plaintext algorithm of QUIC-LB.
type withNumber uint16

func (number withNumber) GenerateConnectionID() (quic.ConnectionID, error) {
	var id [8]byte
	_, err := rand.Read(id[3:])
	id[0] = byte(len(id) - 1)
	binary.BigEndian.PutUint16(id[1:], uint16(number))
	return quic.ConnectionIDFromBytes(id[:]), err
}

func (withNumber) ConnectionIDLen() int { return 8 }

// Returns the settings of TLS, with a certificate that this process signs for itself.
func settings() (*tls.Config, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		DNSNames:     []string{"localhost"},
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
	own, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate := tls.Certificate{Certificate: [][]byte{own}, PrivateKey: key}
	return &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{"work"}}, nil
}

func answer(stream *quic.Stream) error {
	defer stream.Close()
	request, err := io.ReadAll(io.LimitReader(stream, 64))
	if err != nil {
		return err
	}
	var size, ms int
	if _, err := fmt.Fscan(bytes.NewReader(request), &size, &ms); err != nil {
		return err
	}
	fmt.Fprintln(stream, os.Getpid())
	parts := max(1, ms/10)
	for part := range parts {
		length := size*(part+1)/parts - size*part/parts
		if _, err := stream.Write(bytes.Repeat([]byte("a"), length)); err != nil {
			return err
		}
		if ms > 0 {
			time.Sleep(10 * time.Millisecond)
		}
	}
	return nil
}

func serve(connection *quic.Conn) {
	for {
		stream, err := connection.AcceptStream(context.Background())
		if err != nil {
			return
		}
		go answer(stream)
	}
}

func run() error {
	descriptor := 3
	if len(os.Args) > 1 {
		if _, err := fmt.Sscan(os.Args[1], &descriptor); err != nil {
			return err
		}
	}
	socket, err := net.FilePacketConn(os.NewFile(uintptr(descriptor), "socket"))
	if err != nil {
		return err
	}
	transport := &quic.Transport{Conn: socket}
	if number, err := strconv.ParseUint(os.Getenv("WAKEONE_QUIC_ID"), 10, 16); err == nil {
		transport.ConnectionIDGenerator = withNumber(number)
	}
	tls, err := settings()
	if err != nil {
		return err
	}
	listener, err := transport.Listen(tls, nil)
	if err != nil {
		return err
	}
	for {
		connection, err := listener.Accept(context.Background())
		if err != nil {
			return err
		}
		go serve(connection)
	}
}

func main() {
	log.Fatal(run())
}
