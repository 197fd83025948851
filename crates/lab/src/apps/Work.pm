# What `/work?us=N&kind=sleep|cpu` asks of a worker: to be stuck, or to compute, for that long. As `wakeone-lab serve` does it.
package Work;

use strict;
use warnings;
use nginx;
use Time::HiRes qw(clock_gettime usleep CLOCK_MONOTONIC CLOCK_PROCESS_CPUTIME_ID);

sub handler {
    my $r = shift;
    my %want = map { split /=/, $_, 2 } split /&/, $r->args // '';
    my $seconds = ($want{us} // 0) / 1e6;
    # A signal ends usleep() early: go by the clock.
    my $cpu = ($want{kind} // 'cpu') eq 'cpu';
    my $clock = $cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
    my $end = clock_gettime($clock) + $seconds;
    while ((my $left = $end - clock_gettime($clock)) > 0) {
        usleep($left * 1e6) unless $cpu;
    }
    $r->header_out('X-Worker', $$);
    $r->header_out('Content-Length', 3);
    $r->send_http_header('text/plain');
    $r->print("ok\n") unless $r->header_only;
    return OK;
}

1;
