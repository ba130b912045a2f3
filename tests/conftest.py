"Tests press Ctrl-C in programs that they start. Those would ignore it if pytest itself was started in the background of a shell, which makes it ignored."
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
