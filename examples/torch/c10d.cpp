/* c10d.cpp - PyTorch's torch.distributed over dp.h: the backend "dp", for tensors on the CPU.

       import dp_c10d, torch.distributed as dist
       dist.init_process_group("dp")                torchrun, mp.spawn, file://: as with gloo
       net = torch.nn.parallel.DistributedDataParallel(net)

   Build: pip install examples/torch, in a Python that has torch, with gcc or clang, and stb_ds.h
          (Debian: libstb-dev). Or make torch-backend TORCH_PYTHON=python3, which writes build/torch
   Run: torchrun --nproc-per-node 2 train.py

   All collectives of c10d, and messages (send, recv, isend, irecv, from any rank, with tags), on
   tensors of any strides. What is contiguous is not copied here. f32, f64, f16, bf16, integers and
   bool are added: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR. Tensors of every dtype are
   moved. Each process group has two contexts of dp.h, whose processes find each other through the
   group's store: one for collectives, and one for messages, which wait for no collective.
   Collectives run in order: those with async_op on a thread of the group, the others on the
   caller's if that thread has nothing to do.

   DistributedDataParallel puts its buckets into memory that all processes see, where they are added
   in one pass. With gradient_as_bucket_view=True gradients lie there too, and nothing is copied.

   What fails in a job raises DistBackendError with the library's sentence: which rank, and what it
   was in. After that the group can only be destroyed; other groups go on. What only this process
   has done wrong raises RuntimeError, and changes nothing.

   Beside it NCCL may serve tensors on GPUs: init_process_group("cpu:dp,cuda:nccl").

   Processes on several machines are connected over TCP, each with each other one, at any free
   ports or those of $DP_PORTS. They find each other where the way out of a machine is, or at
   $DP_INTERFACE, as GLOO_SOCKET_IFNAME says it to gloo. Nothing is encrypted, as with gloo.

   It is not for sparse tensors or PREMUL_SUM. A process has at most 512 groups at a time, and each
   takes about six of its open files (ulimit -n); on several machines also six for each other
   process. The time-out is that of the group; of single calls only monitored_barrier has one, which
   torch gives to backends other than gloo from 2.15 on. Tested with torch 2.11 and 2.15. */

#include "../../dp.h"
#include <condition_variable>
#include <deque>
#include <list>
#include <numeric>
#include <set>
#include <unistd.h>
#include <mutex>
#include <pybind11/chrono.h>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

namespace
{

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Handle = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

void must(dp_status status)
{
    if (dp_status_class(status) == DP_CLASS_JOB)
        C10_THROW_ERROR(DistBackendError, dp_last_error());
    TORCH_CHECK(status == DP_OK, dp_last_error());
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* Tensors of one dtype as one piece of memory: their own if they lie so, else a copy. */
struct Memory {
    Tensors users;
    char *data = nullptr;
    size_t count = 0; /* of `dtype`: of bytes where dp.h has no such dtype, as far as it is moved */
    dp_dtype dtype = DP_U8;
    bool even = true, adds = false, own = true;
    Tensor copy;

    Memory() = default;
    Memory(Tensors tensors, bool filled) : users(std::move(tensors))
    {
        at::AutoDispatchBelowADInplaceOrView guard;
        const Tensor &first = users.at(0);
        int64_t all = 0;
        for (const Tensor &each : users) {
            TORCH_CHECK(each.device().is_cpu() && each.layout() == at::kStrided,
                        "dp: a dense tensor on the CPU is needed, not ", each.layout(), " on ",
                        each.device());
            TORCH_CHECK(each.scalar_type() == first.scalar_type(),
                        "dp: the tensors of a list have one dtype");
            if (all == 0)
                data = static_cast<char *>(first.data_ptr());
            own = own && each.is_contiguous() &&
                  each.data_ptr() == data + all * int64_t(each.element_size());
            even = even && each.numel() == first.numel();
            all += each.numel();
        }
        find_dtype(first, size_t(all));
        if (own)
            return;
        copy = at::empty({all}, first.options());
        data = static_cast<char *>(copy.data_ptr());
        if (filled)
            each_part([](const Tensor &user, const Tensor &part) { part.copy_(user); });
    }
    void give_back() const
    {
        at::AutoDispatchBelowADInplaceOrView guard;
        if (!own)
            each_part([](const Tensor &user, const Tensor &part) { user.copy_(part); });
    }
    Tensor flat() const
    {
        const auto options = users[0].options().requires_grad(false);
        return own ? at::from_blob(data, {int64_t(bytes() / users[0].element_size())}, options)
                   : copy;
    }
    size_t bytes() const
    {
        return count * dp_dtype_bytes(dtype);
    }

  private:
    void find_dtype(const Tensor &first, size_t all)
    {
        const at::ScalarType in_order[DP_DTYPE_COUNT] = {
            at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
            at::kInt,   at::kShort,  at::kChar, at::kByte,     at::kBool};
        const auto at = std::find(in_order, in_order + DP_DTYPE_COUNT, first.scalar_type());
        adds = at < in_order + DP_DTYPE_COUNT;
        dtype = adds ? static_cast<dp_dtype>(at - in_order) : DP_U8;
        count = adds ? all : all * first.element_size();
    }
    template <class Fn> void each_part(Fn fn) const
    {
        int64_t first = 0;
        for (const Tensor &user : users) {
            fn(user, copy.narrow(0, first, user.numel()).view(user.sizes()));
            first += user.numel();
        }
    }
};

struct Pair {
    Memory in, out; /* without `in`: in place */

    dp_part part() const
    {
        return {in.users.empty() ? out.data : in.data, out.data, nullptr};
    }
};

/* ---- a context, and the thread that runs its calls ------------------------------------------ */

struct Meeting { /* how the processes of a group find each other */
    c10::intrusive_ptr<c10d::Store> store;
    int rank, size, round;
    Milliseconds timeout;
};

dp_status gather_over_store(const void *in, void *out, size_t bytes, void *user)
{
    auto *meeting = static_cast<Meeting *>(user);
    const auto *mine = static_cast<const uint8_t *>(in);
    const std::string round = "dp/" + std::to_string(meeting->round++) + "/";
    try {
        meeting->store->set(round + std::to_string(meeting->rank),
                            std::vector<uint8_t>(mine, mine + bytes));
        for (int i = 0; i < meeting->size; i++) {
            const std::string key = round + std::to_string(i);
            meeting->store->wait({key}, meeting->timeout);
            const std::vector<uint8_t> theirs = meeting->store->get(key);
            if (theirs.size() != bytes)
                return dp_error(DP_ERR_MISMATCH, "rank %d has another dp.h", i);
            std::copy_n(theirs.data(), bytes, static_cast<uint8_t *>(out) + bytes * size_t(i));
        }
        return DP_OK;
    } catch (const c10::Error &error) {
        return dp_error(DP_ERR_TIMEOUT, "%s", error.what_without_backtrace());
    } catch (const std::exception &error) {
        return dp_error(DP_ERR_REMOTE, "%s", error.what());
    }
}

/* One thread at a time is in it. Tensors in its shared memory keep it open. */
struct Context {
    Meeting meeting;
    dp_ctx *ctx = nullptr;
    std::mutex lock;
    std::vector<dp_scope *> left; /* of tensors that are gone */

    explicit Context(const Meeting &with) : meeting(with)
    {
        static const dp_device_ops *const cpu[] = {dp_cpu(), nullptr};
        dp_config config = {};
        config.backends = cpu, config.device_count = 1, config.threads_per_device = -1;
        config.unbound = true; /* threads are torch's */
        config.bootstrap = {gather_over_store, &meeting, meeting.rank, meeting.size};
        config.timeout_ms =
            static_cast<int>(std::clamp<int64_t>(meeting.timeout.count(), 1, INT32_MAX));
        must(dp_open(&config, &ctx));
    }
    Context(const Context &) = delete;
    ~Context()
    {
        dp_close(ctx);
    }

    static Tensor tensor(const std::shared_ptr<Context> &self, int64_t count,
                         const at::TensorOptions &options)
    {
        {
            std::lock_guard hold(self->lock);
            for (dp_scope *scope : std::exchange(self->left, {}))
                dp_scope_end(scope);
        }
        dp_scope *scope = dp_scope_begin(self->ctx);
        void *data = dp_shared_alloc(scope, size_t(count) * options.dtype().itemsize());
        if (data == nullptr) {
            dp_scope_end(scope);
            must(DP_ERR_NO_MEMORY);
        }
        const auto leave = [self, scope](void *) {
            std::lock_guard hold(self->lock);
            self->left.push_back(scope);
        };
        return at::from_blob(data, {count}, leave, options);
    }
};

struct Task final : c10d::Work {
    std::function<void()> run;
    Tensors outputs;
    c10::intrusive_ptr<c10::ivalue::Future> future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    std::exception_ptr failure;
    int source = -1;

    Task(int rank, OpType type, const char *title, const Tensors &inputs, Tensors out)
        : Work(rank, type, title, inputs), outputs(std::move(out))
    {
    }
    void work() noexcept
    {
        try {
            run();
        } catch (...) {
            failure = std::current_exception();
        }
    }
    void done() /* may wait for Python, and runs what the user has attached, which may begin more */
    {
        run = nullptr;
        if (failure)
            future->setError(failure);
        else
            future->markCompleted(c10::IValue(outputs));
        finish(failure);
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override
    {
        return future;
    }
    Tensors result() override
    {
        return outputs;
    }
    int sourceRank() const override
    {
        return source;
    }
};

using TaskHandle = c10::intrusive_ptr<Task>;

/* A thread with what it shares. A child of fork has the object, but no thread. */
struct Helper {
  private:
    const pid_t process_ = getpid();

  protected:
    std::mutex lock_;
    std::condition_variable news_;
    bool closing_ = false;
    std::thread thread_;

    void check_open() const
    {
        TORCH_CHECK(!closing_, "dp: the process group is closed");
    }

  public:
    bool here() const
    {
        return process_ == getpid();
    }
    /* Does what is left, and no more. */
    void close()
    {
        if (here()) {
            std::lock_guard hold(lock_);
            closing_ = true;
            news_.notify_all();
        }
        if (thread_.joinable())
            here() ? thread_.join() : thread_.detach();
    }
};

struct Lane : Helper {
  private:
    std::deque<TaskHandle> queue_;
    bool busy_ = false;

    void loop()
    {
        for (std::unique_lock hold(lock_);;) {
            news_.wait(hold, [this] { return !busy_ && (closing_ || !queue_.empty()); });
            if (queue_.empty())
                return;
            TaskHandle task = std::move(queue_.front());
            queue_.pop_front();
            busy_ = true;
            hold.unlock();
            task->work();
            leave();
            task->done();
            task.reset();
            hold.lock();
        }
    }
    void leave()
    {
        std::lock_guard hold(lock_);
        busy_ = false;
        news_.notify_all();
    }

  public:
    Lane()
    {
        thread_ = std::thread([this] { loop(); });
    }
    ~Lane()
    {
        close();
    }

    void submit(const TaskHandle &task, bool async)
    {
        {
            std::lock_guard hold(lock_);
            check_open();
            const bool inside = std::this_thread::get_id() == thread_.get_id();
            if (busy_ || !(inside || (!async && queue_.empty()))) {
                queue_.push_back(task);
                news_.notify_all();
                return;
            }
            busy_ = true;
        }
        task->work();
        leave();
        task->done();
    }
    bool idle_within(Milliseconds time)
    {
        std::unique_lock hold(lock_);
        return news_.wait_for(hold, time, [this] { return !busy_ && queue_.empty(); });
    }
    /* Between two calls. */
    template <class Fn> auto between(Fn fn)
    {
        std::unique_lock hold(lock_);
        news_.wait(hold, [this] { return !busy_; });
        check_open();
        return fn();
    }
};

struct Message {
    TaskHandle task;
    Memory memory;
    dp_message at;
    std::chrono::steady_clock::time_point until;
};

/* Messages have a context and a thread of their own, and wait for no collective. Each begins at
   once; the thread carries them on. */
struct Post : Helper {
  private:
    const std::shared_ptr<Context> context_;
    std::list<Message> open_;

    /* Moves what is done there. */
    void test(std::list<Message> &done)
    {
        for (auto each = open_.begin(); each != open_.end();) {
            const auto message = each++;
            try {
                const dp_status status = dp_messages_test(context_->ctx, &message->at, 1);
                if (status == DP_PENDING && std::chrono::steady_clock::now() > message->until)
                    dp_abort(context_->ctx, DP_ERR_TIMEOUT,
                             "a message %s rank %d, tag %d, was not done in time",
                             message->at.receives ? "from" : "to", message->at.peer,
                             message->at.tag);
                if (status == DP_PENDING)
                    continue;
                must(status);
            } catch (...) {
                message->task->failure = std::current_exception();
            }
            done.splice(done.end(), open_, message);
        }
    }
    static void finish(std::list<Message> &done)
    {
        for (Message &each : done) {
            each.task->source = each.at.peer;
            if (each.at.receives && !each.task->failure)
                each.memory.give_back();
            each.task->done();
        }
    }
    void loop()
    {
        int looks = 0;
        for (std::unique_lock hold(lock_);;) {
            news_.wait(hold, [this] { return closing_ || !open_.empty(); });
            if (open_.empty())
                return;
            std::list<Message> done;
            test(done);
            looks = done.empty() ? looks + 1 : 0;
            if (done.empty() && looks > 100) {
                news_.wait_for(hold, std::chrono::microseconds(std::min(looks - 100, 1000)));
                continue;
            }
            hold.unlock();
            std::this_thread::yield();
            finish(done);
            done.clear();
            hold.lock();
            news_.notify_all();
        }
    }

  public:
    explicit Post(const Meeting &meeting) : context_(std::make_shared<Context>(meeting))
    {
        thread_ = std::thread([this] { loop(); });
    }
    ~Post()
    {
        close();
    }
    bool idle_within(Milliseconds time)
    {
        std::unique_lock hold(lock_);
        return news_.wait_for(hold, time, [this] { return open_.empty(); });
    }
    void abort(const char *why)
    {
        dp_abort(context_->ctx, DP_ERR_ABORTED, "%s", why);
    }
    Handle begin(Message message)
    {
        std::lock_guard hold(lock_);
        check_open();
        must(dp_messages_begin(context_->ctx, &message.at, 1));
        const TaskHandle task = message.task;
        message.until = std::chrono::steady_clock::now() + context_->meeting.timeout;
        open_.push_back(std::move(message));
        news_.notify_all();
        return task;
    }
};

/* ---- what collectives are made of ----------------------------------------------------------- */

dp_op op_of(const ReduceOp &op)
{
    constexpr dp_op ops[] = {DP_OP_SUM, DP_OP_MEAN, DP_OP_PROD, DP_OP_MIN, DP_OP_MAX};
    TORCH_CHECK(op.op_ <= ReduceOp::MAX, "dp: there is no PREMUL_SUM here");
    return ops[op.op_];
}

using Bitwise = Tensor &(*)(Tensor &, const Tensor &, const Tensor &);

/* NULL: it is none of these. */
Bitwise bitwise_of(const ReduceOp &op)
{
    Bitwise fn = nullptr;
    if (op.op_ == ReduceOp::BAND)
        fn = at::bitwise_and_out;
    else if (op.op_ == ReduceOp::BOR)
        fn = at::bitwise_or_out;
    else if (op.op_ == ReduceOp::BXOR)
        fn = at::bitwise_xor_out;
    return fn;
}

void check_adds(const Memory &memory, const ReduceOp &op)
{
    const auto type = memory.users[0].scalar_type();
    TORCH_CHECK(memory.adds, "dp: tensors of ", type, " are moved, but not added");
    if (bitwise_of(op) == nullptr)
        op_of(op);
    else
        TORCH_CHECK(!at::isFloatingType(type), "dp: bits of ", type, " are not combined");
}

void sum(dp_ctx *ctx, const Memory &memory, const ReduceOp &op)
{
    const Bitwise bits = bitwise_of(op);
    const dp_part part = {memory.data, memory.data, nullptr};
    if (bits == nullptr) {
        must(dp_all_reduce(ctx, &part, memory.count, memory.dtype, op_of(op)));
        return;
    }
    Tensor mine = memory.flat();
    const Tensor all = at::empty({dp_rank_count(ctx), mine.numel()}, mine.options());
    const dp_part gathered = {memory.data, all.data_ptr(), nullptr};
    must(dp_all_gather(ctx, &gathered, memory.count, memory.dtype));
    mine.copy_(all[0]);
    for (int64_t rank = 1; rank < all.size(0); rank++)
        bits(mine, mine, all[rank]);
}

void sum_parts(dp_ctx *ctx, const Pair &pair, const ReduceOp &op)
{
    const Memory &in = pair.in, &out = pair.out;
    if (in.even && bitwise_of(op) == nullptr) {
        const dp_part part = pair.part();
        must(dp_reduce_scatter(ctx, &part, out.count, out.dtype, op_of(op)));
        return;
    }
    const int rank = dp_rank(ctx);
    const Memory all({in.flat().clone()}, true);
    size_t first = in.users.size() > 1 ? 0 : size_t(rank) * out.count;
    for (int i = 0; i < rank && in.users.size() > 1; i++)
        first += size_t(in.users[size_t(i)].numel());
    sum(ctx, all, op);
    std::copy_n(all.data + first * dp_dtype_bytes(out.dtype), out.bytes(), out.data);
}

void gather_uneven(dp_ctx *ctx, const Pair &pair)
{
    char *to = pair.out.data;
    for (size_t rank = 0; rank < pair.out.users.size(); rank++) {
        const size_t bytes = pair.out.users[rank].nbytes();
        const dp_part part = {pair.in.data, to, nullptr};
        must(dp_broadcast(ctx, &part, bytes, DP_U8, int(rank)));
        to += bytes;
    }
}

using Sizes = std::vector<size_t>; /* bytes for each rank */

/* dp.h exchanges parts of one size: that of the largest of all. */
void exchange(dp_ctx *ctx, const Pair &pair, const Sizes &in, const Sizes &out)
{
    const auto largest = std::max(*std::max_element(in.begin(), in.end()),
                                  *std::max_element(out.begin(), out.end()));
    auto most = static_cast<int64_t>(largest);
    must(dp_all_reduce_i64(ctx, &most, 1, DP_OP_MAX));
    const auto each = static_cast<size_t>(most);
    const bool even_in = pair.in.bytes() == each * in.size();
    const bool even_out = pair.out.bytes() == each * out.size();
    std::vector<char> from(even_in ? 0 : each * in.size()), to(even_out ? 0 : each * out.size());
    const char *read = pair.in.data;
    for (size_t i = 0; i < in.size() && !even_in; i++, read += in[i - 1])
        std::copy_n(read, in[i], &from[i * each]);
    const dp_part part = {even_in ? pair.in.data : from.data(),
                          even_out ? pair.out.data : to.data(), nullptr};
    must(dp_all_to_all(ctx, &part, each, DP_U8));
    char *write = pair.out.data;
    for (size_t i = 0; i < out.size() && !even_out; i++, write += out[i - 1])
        std::copy_n(&to[i * each], out[i], write);
}

/* ---- the backend ---------------------------------------------------------------------------- */

struct Backend;
std::mutex open_lock;
std::set<Backend *> open_backends;

struct Backend final : c10d::Backend {
  private:
    const c10::intrusive_ptr<c10d::Store> store_;
    const Milliseconds timeout_;
    const std::shared_ptr<Context> context_;
    Lane lane_;
    Post post_;
    uint64_t sequence_ = 0, monitored_ = 0;

    template <class Fn>
    Handle submit(OpType type, const char *title, bool async, std::vector<Pair> pairs, Fn fn)
    {
        Tensors inputs, outputs;
        for (const Pair &pair : pairs) {
            const Memory &in = pair.in.users.empty() ? pair.out : pair.in;
            inputs.insert(inputs.end(), in.users.begin(), in.users.end());
            outputs.insert(outputs.end(), pair.out.users.begin(), pair.out.users.end());
        }
        auto task = c10::make_intrusive<Task>(rank_, type, title, inputs, std::move(outputs));
        task->run = [fn, pairs = std::move(pairs), ctx = context_->ctx] {
            for (const Pair &pair : pairs) {
                fn(ctx, pair);
                pair.out.give_back();
            }
        };
        lane_.submit(task, async);
        sequence_++;
        return task;
    }
    static Memory one(const Tensors &tensors, bool filled)
    {
        TORCH_CHECK(tensors.size() == 1, "dp: a process has one tensor, not ", tensors.size());
        return {tensors, filled};
    }
    Memory list(const Lists &lists, bool filled) const
    {
        TORCH_CHECK(lists.size() == 1 && lists[0].size() == size_t(size_), "dp: one list of ",
                    size_, " tensors is needed");
        return {lists[0], filled};
    }
    int root(int64_t rank) const
    {
        TORCH_CHECK(rank >= 0 && rank < size_, "dp: root ", rank, " of ", size_, " ranks");
        return int(rank);
    }
    void has_parts(const Memory &whole, const Memory &part) const
    {
        TORCH_CHECK(whole.users[0].scalar_type() == part.users[0].scalar_type() && whole.even &&
                        whole.count == part.count * size_t(size_),
                    "dp: ", part.users[0].scalar_type(), " ", part.users[0].sizes(),
                    " does not fit the ", whole.users[0].scalar_type(), " of all ", size_,
                    " ranks");
    }
    void has_mine(const Memory &whole, const Memory &part) const /* others may be larger */
    {
        const Tensor &mine = whole.users[size_t(rank_)];
        TORCH_CHECK(mine.scalar_type() == part.users[0].scalar_type() &&
                        mine.numel() == part.users[0].numel(),
                    "dp: ", part.users[0].scalar_type(), " ", part.users[0].sizes(),
                    " does not fit ", mine.scalar_type(), " ", mine.sizes());
    }

  public:
    Backend(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, Milliseconds timeout)
        : c10d::Backend(rank, size), store_(store), timeout_(timeout),
          context_(std::make_shared<Context>(meeting("collectives"))), post_(meeting("messages"))
    {
        std::lock_guard hold(open_lock);
        open_backends.insert(this);
    }
    ~Backend() override
    {
        std::lock_guard hold(open_lock);
        open_backends.erase(this);
    }
    Meeting meeting(const char *name) const
    {
        return {c10::make_intrusive<c10d::PrefixStore>(name, store_), rank_, size_, 0, timeout_};
    }
    const std::string getBackendName() const override
    {
        return "dp";
    }
    uint64_t getSequenceNumberForGroup() override
    {
        return sequence_;
    }
    void setSequenceNumberForGroup() override
    {
    }
    void shutdown() override
    {
        lane_.close();
        post_.close();
    }
    void leave()
    {
        const Milliseconds moment(2000);
        if (lane_.here() && !(lane_.idle_within(moment) && post_.idle_within(moment)))
            abort();
        shutdown();
    }
    void abort() override
    {
        const std::string why = "rank " + std::to_string(rank_) + " has aborted the process group";
        dp_abort(context_->ctx, DP_ERR_ABORTED, "%s", why.c_str());
        post_.abort(why.c_str());
    }

    /* Buckets of DistributedDataParallel. */
    bool supportsTensorAlloc(c10::DeviceIndex) override
    {
        return size_ > 1;
    }
    Tensor allocateTensor(long count, at::TensorOptions options) override
    {
        std::optional<pybind11::gil_scoped_release> others; /* a call may wait for Python to end */
        if (PyGILState_Check())
            others.emplace();
        return lane_.between([&] { return Context::tensor(context_, count, options); });
    }

    Handle sum_each(OpType type, const Tensors &tensors, const c10d::AllreduceOptions &opts)
    {
        std::vector<Pair> pairs;
        for (const Tensor &each : tensors) {
            pairs.push_back({{}, {{each}, true}});
            check_adds(pairs.back().out, opts.reduceOp);
        }
        return submit(
            type, "dp:all_reduce", opts.asyncOp, std::move(pairs),
            [op = opts.reduceOp](dp_ctx *ctx, const Pair &pair) { sum(ctx, pair.out, op); });
    }
    Handle allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) override
    {
        return sum_each(OpType::ALLREDUCE, tensors, opts);
    }
    Handle allreduce_coalesced(Tensors &tensors,
                               const c10d::AllreduceCoalescedOptions &opts) override
    {
        return sum_each(OpType::ALLREDUCE_COALESCED, tensors, opts);
    }
    Handle broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) override
    {
        return submit(OpType::BROADCAST, "dp:broadcast", opts.asyncOp, {{{}, one(tensors, true)}},
                      [root = root(opts.rootRank)](dp_ctx *ctx, const Pair &pair) {
                          const dp_part part = pair.part();
                          must(dp_broadcast(ctx, &part, pair.out.count, pair.out.dtype, root));
                      });
    }
    Handle reduce(Tensors &tensors, const c10d::ReduceOptions &opts) override
    {
        Pair pair = {one(tensors, true), {}};
        check_adds(pair.in, opts.reduceOp);
        const bool bits = bitwise_of(opts.reduceOp) != nullptr;
        if (root(opts.rootRank) == rank_)
            std::swap(pair.in, pair.out);
        else if (bits)
            pair.in = {{pair.in.flat().clone()}, true}; /* all combine */
        return submit(
            OpType::REDUCE, "dp:reduce", opts.asyncOp, {pair},
            [bits, op = opts.reduceOp, root = int(opts.rootRank)](dp_ctx *ctx, const Pair &pair) {
                const Memory &mine = pair.in.users.empty() ? pair.out : pair.in;
                const dp_part part = pair.part();
                if (bits)
                    sum(ctx, mine, op);
                else
                    must(dp_reduce_to(ctx, &part, mine.count, mine.dtype, op_of(op), root));
            });
    }
    /* Lists may have tensors of different sizes, the same ones in all processes. */
    Handle allgather(Lists &outputs, Tensors &inputs, const c10d::AllgatherOptions &opts) override
    {
        Pair pair = {one(inputs, true), list(outputs, false)};
        has_mine(pair.out, pair.in);
        return submit(OpType::ALLGATHER, "dp:all_gather", opts.asyncOp, {pair}, gather_all);
    }
    static void gather_all(dp_ctx *ctx, const Pair &pair)
    {
        const dp_part part = pair.part();
        if (pair.out.even)
            must(dp_all_gather(ctx, &part, pair.in.count, pair.in.dtype));
        else
            gather_uneven(ctx, pair);
    }
    Handle gather_each(const Tensors &outputs, const Tensors &inputs,
                       const c10d::AllgatherOptions &opts)
    {
        return submit(OpType::_ALLGATHER_BASE, "dp:all_gather", opts.asyncOp,
                      pairs(inputs, outputs, false), gather_all);
    }
    std::vector<Pair> pairs(const Tensors &inputs, const Tensors &outputs, bool scatters) const
    {
        std::vector<Pair> all;
        TORCH_CHECK(outputs.size() == inputs.size(), "dp: as many outputs as inputs are needed");
        for (size_t i = 0; i < inputs.size(); i++) {
            all.push_back({{{inputs[i]}, true}, {{outputs[i]}, false}});
            has_parts(scatters ? all[i].in : all[i].out, scatters ? all[i].out : all[i].in);
        }
        return all;
    }
    Handle _allgather_base(Tensor &output, Tensor &input,
                           const c10d::AllgatherOptions &opts) override
    {
        return gather_each({output}, {input}, opts);
    }
    Handle allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                           const c10d::AllgatherOptions &opts) override
    {
        return gather_each(outputs, inputs, opts);
    }
    Handle allgather_coalesced(Lists &outputs, Tensors &inputs,
                               const c10d::AllgatherOptions &opts) override
    {
        std::vector<Pair> all;
        for (size_t i = 0; i < inputs.size(); i++) {
            Lists column(1);
            for (const Tensors &row : outputs)
                column[0].push_back(row.at(i));
            all.push_back({{{inputs[i]}, true}, list(column, false)});
            has_parts(all[i].out, all[i].in);
        }
        return submit(OpType::ALLGATHER_COALESCED, "dp:all_gather", opts.asyncOp, std::move(all),
                      gather_all);
    }
    Handle gather(Lists &outputs, Tensors &inputs, const c10d::GatherOptions &opts) override
    {
        Pair pair = {one(inputs, true), {}};
        TORCH_CHECK(opts.rootRank == rank_ || outputs.empty(), "dp: outputs are the root's");
        if (root(opts.rootRank) == rank_)
            has_parts(pair.out = list(outputs, false), pair.in);
        return submit(OpType::GATHER, "dp:gather", opts.asyncOp, {pair},
                      [root = int(opts.rootRank)](dp_ctx *ctx, const Pair &pair) {
                          const dp_part part = pair.part();
                          must(dp_gather_to(ctx, &part, pair.in.count, pair.in.dtype, root));
                      });
    }
    Handle scatter(Tensors &outputs, Lists &inputs, const c10d::ScatterOptions &opts) override
    {
        Pair pair = {{}, one(outputs, false)};
        TORCH_CHECK(opts.rootRank == rank_ || inputs.empty(), "dp: inputs are the root's");
        if (root(opts.rootRank) == rank_)
            has_parts(pair.in = list(inputs, true), pair.out);
        return submit(OpType::SCATTER, "dp:scatter", opts.asyncOp, {pair},
                      [root = int(opts.rootRank)](dp_ctx *ctx, const Pair &pair) {
                          const dp_part part = {pair.in.data, pair.out.data, nullptr};
                          must(dp_scatter_from(ctx, &part, pair.out.count, pair.out.dtype, root));
                      });
    }
    Handle sum_parts_of(OpType type, std::vector<Pair> all, const c10d::ReduceScatterOptions &opts)
    {
        for (const Pair &pair : all)
            check_adds(pair.out, opts.reduceOp);
        return submit(
            type, "dp:reduce_scatter", opts.asyncOp, std::move(all),
            [op = opts.reduceOp](dp_ctx *ctx, const Pair &pair) { sum_parts(ctx, pair, op); });
    }
    Handle reduce_scatter(Tensors &outputs, Lists &inputs,
                          const c10d::ReduceScatterOptions &opts) override
    {
        Pair pair = {list(inputs, true), one(outputs, false)};
        has_mine(pair.in, pair.out);
        return sum_parts_of(OpType::REDUCE_SCATTER, {pair}, opts);
    }
    Handle _reduce_scatter_base(Tensor &output, Tensor &input,
                                const c10d::ReduceScatterOptions &opts) override
    {
        return sum_parts_of(OpType::_REDUCE_SCATTER_BASE, pairs({input}, {output}, true), opts);
    }
    Handle reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                           const c10d::ReduceScatterOptions &opts) override
    {
        return sum_parts_of(OpType::_REDUCE_SCATTER_BASE, pairs(inputs, outputs, true), opts);
    }
    Handle exchange_all(OpType type, Pair pair, const Sizes &in, const Sizes &out, bool async)
    {
        TORCH_CHECK(pair.in.users[0].scalar_type() == pair.out.users[0].scalar_type() &&
                        in[size_t(rank_)] == out[size_t(rank_)],
                    "dp: what a rank sends itself does not fit what it receives");
        return submit(type, "dp:all_to_all", async, {std::move(pair)},
                      [in, out](dp_ctx *ctx, const Pair &both) { exchange(ctx, both, in, out); });
    }
    /* Of rows: as many for each rank, unless `given` says how many. */
    Sizes cut(const Tensor &whole, const std::vector<int64_t> &given) const
    {
        const int64_t rows = whole.dim() > 0 ? whole.size(0) : 1, ranks = size_;
        const int64_t all = given.empty() ? rows
                                          : std::accumulate(given.begin(), given.end(), int64_t(0));
        TORCH_CHECK(given.empty() ? rows % ranks == 0
                                  : given.size() == size_t(ranks) && all == rows,
                    "dp: ", rows, " rows are not cut into the split sizes [", given, "] for ",
                    ranks, " ranks");
        Sizes sizes(size_t(ranks), size_t(rows / ranks));
        std::copy(given.begin(), given.end(), sizes.begin());
        for (size_t &each : sizes)
            each *= rows > 0 ? whole.nbytes() / size_t(rows) : 0;
        return sizes;
    }
    Handle alltoall_base(Tensor &output, Tensor &input, std::vector<int64_t> &output_rows,
                         std::vector<int64_t> &input_rows,
                         const c10d::AllToAllOptions &opts) override
    {
        return exchange_all(OpType::ALLTOALL_BASE, {{{input}, true}, {{output}, false}},
                            cut(input, input_rows), cut(output, output_rows), opts.asyncOp);
    }
    Handle alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &opts) override
    {
        Pair pair = {list({inputs}, true), list({outputs}, false)};
        Sizes in, out;
        for (int i = 0; i < size_; i++) {
            in.push_back(inputs[size_t(i)].nbytes());
            out.push_back(outputs[size_t(i)].nbytes());
        }
        return exchange_all(OpType::ALLTOALL, std::move(pair), in, out, opts.asyncOp);
    }
    Handle message(OpType type, const char *title, const Tensors &tensors, int peer, int tag)
    {
        const bool receives = type != OpType::SEND;
        Message message = {nullptr, one(tensors, !receives), {}, {}};
        const auto count = static_cast<int64_t>(message.memory.count);
        message.at.tensor = dp_wrap(message.memory.data, message.memory.dtype, 1, &count);
        message.at.peer = peer, message.at.tag = tag, message.at.receives = receives;
        message.task = c10::make_intrusive<Task>(rank_, type, title, tensors, tensors);
        return post_.begin(std::move(message));
    }
    Handle send(Tensors &tensors, int to, int tag) override
    {
        return message(OpType::SEND, "dp:send", tensors, to, tag);
    }
    Handle recv(Tensors &tensors, int from, int tag) override
    {
        return message(OpType::RECV, "dp:recv", tensors, from, tag);
    }
    Handle recvAnysource(Tensors &tensors, int tag) override
    {
        return message(OpType::RECVANYSOURCE, "dp:recv_any", tensors, DP_ANY_RANK, tag);
    }
    void startCoalescing() override
    {
    }
    Handle endCoalescing() override /* done when all before are */
    {
        return submit(OpType::COALESCED, "dp:coalesced", true, {}, gather_all);
    }
    Handle barrier(const c10d::BarrierOptions &opts) override
    {
        return submit(OpType::BARRIER, "dp:barrier", opts.asyncOp, std::vector<Pair>(1),
                      [](dp_ctx *ctx, const Pair &) { must(dp_barrier(ctx)); });
    }
    /* Over the store: who does not come harms no other call. */
    void monitoredBarrier(const c10d::BarrierOptions &opts, bool wait_all) override
    {
        const Milliseconds timeout = opts.timeout.count() > 0 ? opts.timeout : timeout_;
        const auto until = std::chrono::steady_clock::now() + timeout;
        const std::string key = "dp/monitored/" + std::to_string(monitored_++) + "/";
        std::string missing;
        lane_.between([] {});
        store_->set(key + std::to_string(rank_), "here");
        for (int rank = 1; rank < size_ && rank_ == 0 && (wait_all || missing.empty()); rank++) {
            const auto left =
                std::chrono::duration_cast<Milliseconds>(until - std::chrono::steady_clock::now());
            try {
                store_->wait({key + std::to_string(rank)}, std::max(left, Milliseconds(1)));
            } catch (const std::exception &) {
                missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
            }
        }
        if (rank_ == 0)
            store_->set(key + "all", missing);
        else
            store_->wait({key + "all"}, timeout + Milliseconds(1000));
        missing = store_->get_to_str(key + "all");
        if (!missing.empty())
            C10_THROW_ERROR(DistBackendError, "dp: monitored_barrier: after " +
                                                  std::to_string(timeout.count()) +
                                                  " ms these ranks are missing: " + missing);
    }
};

/* At the end of the process, as its threads must not meet a Python that has ended. What is under
   way gets a moment. */
void leave()
{
    std::lock_guard hold(open_lock);
    for (Backend *each : open_backends)
        each->leave();
}

c10::intrusive_ptr<c10d::Backend> create(const c10::intrusive_ptr<c10d::Store> &store, int rank,
                                         int size, const Milliseconds &timeout)
{
    return c10::make_intrusive<Backend>(store, rank, size, timeout);
}

} // namespace

PYBIND11_MODULE(_c10d, module)
{
    module.doc() = "The backend \"dp\" of torch.distributed: dp.h for tensors on the CPU";
    module.def("create", &create, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def("leave", &leave, pybind11::call_guard<pybind11::gil_scoped_release>());
    pybind11::module::import("atexit").attr("register")(module.attr("leave"));
    pybind11::module::import("torch.distributed")
        .attr("Backend")
        .attr("register_backend")("dp", module.attr("create"),
                                  pybind11::arg("devices") = std::vector<std::string>{"cpu"});
}
