# Sums of cargo test's output with --show-output: the last line is `N passed, N failed`. With a file `sums` both numbers go
# there instead, and after them the names of those that failed.

BEGIN {
    # A pattern of the reason a line; what follows a tab says why that is all right.
    while (strict && (getline line < "scripts/may-skip") > 0)
        if (line !~ /^(#|$)/) { sub(/\t.*/, "", line); may[line] }
}

# If a test binary dies, or code does not compile, no test reports that failure.
/^cargo ended: / { ended = $3 == 0; next }
/^successes:$/ { hidden = 1 }
/^failures:$/ || /^test result:/ { hidden = 0; failing = /^failures/ }
/^test .* FAILED$/ && !hidden { names = names $2 "\n" }
/^test result:/ { passed += $4; failed += $6 }
/^---- .* stdout ----$/ { fresh = !failing }

# A test counts as skipped once, however often it says so. A test that leaves out a part of itself has passed.
/^(skipped|not run|left out): / && fresh {
    if (/^skipped/) { fresh = 0; skipped++ }
    allowed = !strict
    for (reason in may) if ($0 ~ reason) allowed = 1
    if (!allowed) { refused++; print "may not be left out in CI:" }
}

!hidden || /^(skipped|not run|left out): / { print; fflush() }

END {
    if (skipped) print skipped " skipped"
    if (!ended && !failed && !refused) failed = 1
    failed += refused
    if (sums) printf "%d %d\n%s", passed - skipped, failed, names > sums
    else printf "%d passed, %d failed\n", passed - skipped, failed
    exit !!failed
}
