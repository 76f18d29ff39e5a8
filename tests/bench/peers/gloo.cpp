/* gloo.cpp - gloo's all-reduce of floats between two processes, over TCP on the loopback device as
   torch uses it by default, for the driver in bench.c.

       peer_gloo DIRECTORY

   Says "ready" and gloo's version, with the package's, as gloo's own is the same for years; then,
   for each line "in_place BYTES CALLS" or "apart BYTES CALLS" on the standard input, makes one call
   that does not count and CALLS that do, and answers with the nanoseconds that one took.
   Rank 1 is a child that hears of it through a pipe. Ends with its input, and leaves nothing in the
   directory. */

#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/config.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace
{

struct request {
    char how[16];
    size_t bytes;
    int calls;
};

struct rank {
    std::shared_ptr<gloo::rendezvous::Context> context;
    std::vector<float> send, recv;

    rank(int index, const std::string &directory)
    {
        gloo::transport::tcp::attr attr;
        attr.hostname = "127.0.0.1";
        auto device = gloo::transport::tcp::CreateDevice(attr);
        gloo::rendezvous::FileStore store(directory);
        context = std::make_shared<gloo::rendezvous::Context>(index, 2);
        context->connectFullMesh(store, device);
    }

    void all_reduce(const request &r)
    {
        gloo::AllreduceOptions options(context);
        const size_t count = r.bytes / sizeof(float);
        if (std::strcmp(r.how, "in_place") != 0)
            options.setInput(send.data(), count);
        options.setOutput(recv.data(), count);
        options.setReduceFunction(
            static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
        gloo::allreduce(options);
    }

    double serve(const request &r)
    {
        send.assign(r.bytes / sizeof(float), 1);
        recv.assign(r.bytes / sizeof(float), 1);
        gloo::BarrierOptions options(context);
        gloo::barrier(options);
        all_reduce(r);
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < r.calls; i++)
            all_reduce(r);
        const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() -
                                                               start;
        return spent.count() / r.calls;
    }
};

void lead(const std::string &directory, int pipe)
{
    rank self(0, directory);
    request r = {};
    char line[128];
    std::printf("ready gloo %d.%d.%d, %s\n", GLOO_VERSION_MAJOR, GLOO_VERSION_MINOR,
                GLOO_VERSION_PATCH, GLOO_PACKAGE);
    std::fflush(stdout);
    while (std::fgets(line, sizeof(line), stdin) != nullptr) {
        if (std::sscanf(line, "%15s %zu %d", r.how, &r.bytes, &r.calls) != 3)
            break;
        if (write(pipe, &r, sizeof(r)) != static_cast<ssize_t>(sizeof(r)))
            break;
        std::printf("%.1f\n", self.serve(r));
        std::fflush(stdout);
    }
    close(pipe);
}

void follow(const std::string &directory, int pipe)
{
    rank self(1, directory);
    request r;
    while (read(pipe, &r, sizeof(r)) == static_cast<ssize_t>(sizeof(r)))
        self.serve(r);
}

} // namespace

int main(int argc, char **argv)
{
    int ends[2];
    if (argc != 2 || pipe(ends) != 0)
        return 2;
    std::string directory = std::string(argv[1]) + "/gloo.XXXXXX";
    if (mkdtemp(&directory[0]) == nullptr)
        return 2;
    const pid_t child = fork();
    if (child < 0)
        return 3;
    close(ends[child == 0 ? 1 : 0]);
    if (child == 0) {
        follow(directory, ends[0]);
        return 0;
    }
    lead(directory, ends[1]);
    waitpid(child, nullptr, 0);
    std::filesystem::remove_all(directory);
    return 0;
}
