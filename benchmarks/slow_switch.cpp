// A switch between hosts, in user space, for kernels without netem: what comes from one TAP device goes to another one after
// a delay, at a rate.
//
//   slow_switch DELAY_US MBIT FD FD ...      MBIT of each host, or one for each host, as 510,320; 0: no limit
//
// A line "A B US" on stdin makes the link between two hosts slower by so many microseconds, in both directions, from then on.
//
// The devices are open with IFF_VNET_HDR and offloads, so that a message of some KB is one packet, as on a network card.
// The last byte of a host's hardware address is its place in the list.

#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <vector>

namespace {

constexpr size_t kHeader = 10;  // struct virtio_net_hdr
constexpr size_t kLargest = kHeader + 14 + 65536;
constexpr int kBatch = 32;  // packets of one host before others have a turn

struct Packet {
    int64_t due_ns;
    std::shared_ptr<std::vector<uint8_t>> bytes;
    size_t target;
};

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) {
        std::fprintf(stderr, "slow_switch DELAY_US MBIT FD FD ...\n");
        return 2;
    }
    const int64_t delay_ns = static_cast<int64_t>(1000 * std::atof(argv[1]));
    std::vector<double> ns_per_byte;
    for (const char* at = argv[2]; at != nullptr; at = std::strchr(at, ',') ? std::strchr(at, ',') + 1 : nullptr) {
        const double mbit = std::atof(at);
        ns_per_byte.push_back(mbit > 0 ? 8000 / mbit : 0);
    }
    std::vector<pollfd> hosts;
    for (int i = 3; i < argc; ++i) hosts.push_back({std::atoi(argv[i]), POLLIN, 0});
    const size_t n_hosts = hosts.size();
    ns_per_byte.resize(n_hosts, ns_per_byte.back());
    std::vector<std::deque<Packet>> queues(n_hosts * n_hosts);  // of what each host has sent to each other, oldest first
    std::vector<int64_t> more_ns(n_hosts * n_hosts, 0);  // of such a pair
    hosts.push_back({STDIN_FILENO, POLLIN, 0});
    std::vector<int64_t> free_at(n_hosts, 0);
    std::vector<uint8_t> buffer(kLargest);
    prctl(PR_SET_TIMERSLACK, 1);  // else the kernel wakes us 50 us late

    for (;;) {
        int64_t due = 0;
        for (auto& queue : queues) {
            while (!queue.empty() && queue.front().due_ns <= now_ns()) {
                const Packet& packet = queue.front();
                if (write(hosts[packet.target].fd, packet.bytes->data(), packet.bytes->size()) < 0) {
                    // a full device loses a packet, as cards do; TCP sends it again
                }
                queue.pop_front();
            }
            if (!queue.empty() && (due == 0 || queue.front().due_ns < due)) due = queue.front().due_ns;
        }
        const int64_t left = due == 0 ? 0 : due - now_ns();
        const timespec wait = {left > 0 ? left / 1000000000 : 0, left > 0 ? left % 1000000000 : 0};
        if (ppoll(hosts.data(), hosts.size(), due == 0 ? nullptr : &wait, nullptr) <= 0) continue;
        if (hosts[n_hosts].revents & (POLLIN | POLLHUP)) {
            char line[100] = {};
            const ssize_t got = read(STDIN_FILENO, line, sizeof line - 1);
            size_t a = 0, b = 0;
            double us = 0;
            if (got <= 0) {
                hosts[n_hosts].fd = -1;  // nobody writes any more
            } else if (std::sscanf(line, "%zu %zu %lf", &a, &b, &us) == 3 && a < n_hosts && b < n_hosts) {
                more_ns[a * n_hosts + b] = more_ns[b * n_hosts + a] = static_cast<int64_t>(1000 * us);
            }
        }
        for (size_t i = 0; i < n_hosts; ++i) {
            if (!(hosts[i].revents & POLLIN)) continue;
            for (int n = 0; n < kBatch; ++n) {
                const ssize_t got = read(hosts[i].fd, buffer.data(), buffer.size());
                if (got < static_cast<ssize_t>(kHeader + 14)) break;
                const int64_t now = now_ns(), begin = free_at[i] > now ? free_at[i] : now;
                free_at[i] = begin + static_cast<int64_t>((got - kHeader) * ns_per_byte[i]);
                auto bytes = std::make_shared<std::vector<uint8_t>>(buffer.begin(), buffer.begin() + got);
                const bool is_for_all = buffer[kHeader] & 1;
                for (size_t k = 0; k < n_hosts; ++k) {
                    if (k != i && (is_for_all || k == buffer[kHeader + 5])) {
                        const size_t pair = i * n_hosts + k;
                        queues[pair].push_back({free_at[i] + delay_ns + more_ns[pair], bytes, k});
                    }
                }
            }
        }
    }
}
