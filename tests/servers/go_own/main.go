// One Go server on a SO_REUSEPORT listener of its own, on one as it is, or on an inherited one:
// go_server ADDRESS|plain:ADDRESS|fd:N
//
// /work?us=N takes N µs. Each answer is counted in $WAKEONE_COUNT, and names the process in X-Worker.
package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// The value on x86-64 and arm64; the package syscall does not have it.
const soReusePort = 15

func listen(from string) (net.Listener, error) {
	if number, inherited := strings.CutPrefix(from, "fd:"); inherited {
		fd, err := strconv.Atoi(number)
		if err != nil {
			return nil, err
		}
		return net.FileListener(os.NewFile(uintptr(fd), "listener"))
	}
	if address, plain := strings.CutPrefix(from, "plain:"); plain {
		return net.Listen("tcp", address)
	}
	config := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		var failed error
		err := socket.Control(func(fd uintptr) {
			failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, soReusePort, 1)
		})
		if err != nil {
			return err
		}
		return failed
	}}
	return config.Listen(context.Background(), "tcp4", from)
}

func main() {
	listener, err := listen(os.Args[1])
	if err != nil {
		panic(err)
	}
	count, _ := os.OpenFile(os.Getenv("WAKEONE_COUNT"), os.O_WRONLY|os.O_APPEND, 0)
	worker := strconv.Itoa(os.Getpid())
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		us, _ := strconv.Atoi(r.URL.Query().Get("us"))
		time.Sleep(time.Duration(us) * time.Microsecond)
		count.Write([]byte("."))
		w.Header().Set("X-Worker", worker)
		fmt.Fprint(w, "ok\n")
	})}
	ended := make(chan struct{})
	go func() {
		end := make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM)
		<-end
		grace, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		server.Shutdown(grace)
		close(ended)
	}()
	fmt.Println("serving", os.Args[1])
	server.Serve(listener)
	<-ended
}
