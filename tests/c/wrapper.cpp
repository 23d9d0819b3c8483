// The C++ header: owners, views, exceptions, work. One rank; the first argument is a folder.
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <thread>
#include <unisono.hpp>

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: %s is not so\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

namespace {

// A 16-bit float of the program's own.
struct Half {
  std::uint16_t bits;
};

}  // namespace

template <>
struct unisono::dtype_of<Half> : unisono::dtype_is<UNISONO_FLOAT16> {};

namespace {

using unisono::Communicator;
using unisono::Error;

template <class Call>
Error thrown_by(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  std::fprintf(stderr, "nothing was thrown\n");
  std::exit(1);
}

// Files in a folder, one for each key.
class Folder final : public unisono::Store {
 public:
  explicit Folder(std::string path) : path_(std::move(path)) {}

  void set(const std::string& key, const std::string& value) override {
    const std::string path = path_of(key);
    const std::string fresh = path + "." + std::to_string(std::rand()) + std::getenv("RANK");
    std::ofstream(fresh, std::ios::binary) << value;
    if (std::rename(fresh.c_str(), path.c_str()) != 0) throw std::runtime_error("no " + path);
  }
  std::optional<std::string> get(const std::string& key) override {
    std::ifstream file(path_of(key), std::ios::binary);
    if (!file) return std::nullopt;
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  std::optional<std::string> wait(const std::string& key, unisono::Seconds limit) override {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (std::chrono::steady_clock::now() < until) {
      if (auto found = get(key)) return found;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return std::nullopt;
  }

 private:
  std::string path_of(std::string key) const {
    for (char& letter : key) letter = letter == '/' ? '_' : letter;
    return path_ + "/" + key;
  }
  std::string path_;
};

class Broken final : public unisono::Store {
 public:
  void set(const std::string& /*key*/, const std::string& /*value*/) override {
    throw std::logic_error("no luck");
  }
  std::optional<std::string> get(const std::string& /*key*/) override {
    throw std::logic_error("no luck");
  }
  std::optional<std::string> wait(const std::string& /*key*/, unisono::Seconds) override {
    throw std::logic_error("no luck");
  }
};

void types() {
  static_assert(unisono::dtype_of<float>::value == UNISONO_FLOAT32);
  static_assert(unisono::dtype_of<long>::value == UNISONO_INT64);
  static_assert(unisono::dtype_of<long long>::value == UNISONO_INT64);
  static_assert(unisono::dtype_of<unsigned char>::value == UNISONO_UINT8);
  static_assert(unisono::dtype_of<std::complex<double>>::value == UNISONO_COMPLEX128);
  static_assert(unisono::dtype_of<Half>::value == UNISONO_FLOAT16);
  static_assert(!std::is_copy_constructible_v<Communicator>);
  static_assert(!std::is_copy_constructible_v<unisono::Work>);
}

void collectives(const Communicator& comm) {
  const int rank = comm.rank(), world = comm.size();
  const auto n = static_cast<std::size_t>(world), me = static_cast<std::size_t>(rank);
  const float all = static_cast<float>(world * (world + 1)) / 2;
  const float mine = static_cast<float>(rank + 1);

  std::vector<float> x(10, mine), y(10);
  comm.all_reduce(x, y, UNISONO_SUM);
  CHECK(y == std::vector<float>(10, all) && x == std::vector<float>(10, mine));
  comm.all_reduce(x, UNISONO_MAX);
  CHECK(x[9] == static_cast<float>(world));
  std::array<std::int64_t, 3> integers{rank, 1, 2};
  comm.all_reduce(integers, UNISONO_SUM);
  CHECK(integers[1] == world);
  std::complex<float> z(1, 2);
  comm.all_reduce(unisono::View(&z, 1), UNISONO_SUM);
  CHECK(z == std::complex<float>(static_cast<float>(world), static_cast<float>(2 * world)));
  Half half[2] = {{0x3c00}, {0x4000}};
  comm.all_reduce(half, UNISONO_MAX);
  CHECK(half[0].bits == 0x3c00 && half[1].bits == 0x4000);
  float scaled = 1;
  comm.all_reduce(unisono::View(&scaled, 1), UNISONO_PREMUL_SUM, unisono::Options().factor(0.5));
  CHECK(scaled == static_cast<float>(world) / 2);

  x.assign(4, mine);
  std::vector<float> nothing, reduced(rank == 0 ? 4 : 0);
  comm.reduce(x, reduced, UNISONO_SUM, 0);
  CHECK(rank != 0 || reduced[3] == all);
  comm.reduce(x, UNISONO_SUM, 0);
  CHECK(x[0] == (rank == 0 ? all : mine));
  std::vector<int> ordinal(3, 1), before(rank == 0 ? 0 : 3);
  comm.exscan(ordinal, before, UNISONO_SUM);
  CHECK(rank == 0 || before[2] == rank);
  comm.scan(ordinal, UNISONO_SUM);
  CHECK(ordinal[0] == rank + 1);
  comm.exscan(ordinal, UNISONO_MAX);
  CHECK(ordinal[1] == (rank == 0 ? 1 : rank));
  std::string text = rank == 0 ? "hello" : "-----";
  comm.broadcast(text, 0);
  CHECK(text == "hello");

  std::vector<float> one(2, mine), many(2 * n);
  comm.all_gather(one, many);
  CHECK(many[2 * n - 1] == static_cast<float>(world) && many[0] == 1);
  comm.reduce_scatter(many, one, UNISONO_SUM);
  CHECK(one[0] == static_cast<float>(world) * mine);
  one.assign(2, mine);
  std::vector<float> gathered(rank == 0 ? 2 * n : 0);
  comm.gather(one, gathered, 0);
  CHECK(rank != 0 || gathered == many);
  comm.scatter(gathered, one, 0);
  CHECK(one[1] == mine);
  std::vector<float> swapped(2 * n);
  comm.all_to_all(many, swapped);
  CHECK(swapped == std::vector<float>(2 * n, mine));

  std::vector<std::size_t> counts(n);
  std::iota(counts.begin(), counts.end(), 1);
  const std::size_t total = n * (n + 1) / 2;
  std::vector<int> part(me + 1, rank), whole(total);
  comm.all_gather_v(part, whole, counts);
  CHECK(whole.front() == 0 && whole.back() == world - 1);
  comm.reduce_scatter_v(whole, part, counts, UNISONO_SUM);
  CHECK(part[0] == world * rank);
  part.assign(me + 1, rank);
  std::vector<int> root_whole(rank == 0 ? total : 0);
  comm.gather_v(part, root_whole, counts, 0);
  CHECK(rank != 0 || root_whole == whole);
  comm.scatter_v(root_whole, counts, part, 0);
  CHECK(part[0] == rank);
  const std::vector<std::size_t> from(n, me + 1);
  std::vector<int> incoming(n * (me + 1));
  comm.all_to_all_v(whole, counts, incoming, from);
  CHECK(incoming[me] == rank && incoming.size() == n * (me + 1));

  std::vector<float, unisono::Allocator<float>> shared(100000, mine);
  comm.all_reduce(shared, UNISONO_SUM);
  CHECK(shared[99999] == all);
  comm.barrier();
}

void work(const Communicator& comm) {
  const int rank = comm.rank(), world = comm.size();
  const int next = (rank + 1) % world, previous = (rank + world - 1) % world;
  std::vector<double> x(1000, 1.0);
  auto first = comm.async().all_reduce(x, UNISONO_SUM);
  auto second = comm.async().barrier();
  CHECK(first.valid());
  first.wait();
  CHECK(first.done() && x[999] == world);
  second = comm.async().barrier();
  CHECK(second.wait_for(std::chrono::seconds(20)));

  int mine = rank, theirs = -1;
  auto receive = comm.async().recv(unisono::View(&theirs, 1), previous, 3);
  if (world > 1) CHECK(!receive.wait_for(std::chrono::milliseconds(1)) || theirs == previous);
  comm.send(unisono::View(&mine, 1), next, 3);
  receive.wait();
  CHECK(receive.source() == previous && theirs == previous);

  const int sent = 100 + rank;
  CHECK(comm.sendrecv(unisono::View(&sent, 1), next, unisono::View(&theirs, 1), previous, 4) ==
        previous);
  CHECK(theirs == 100 + previous);

  std::vector<unisono::Work> works;
  std::vector<int> got(3, -1);
  for (std::uint64_t tag = 0; tag < 3; tag++)
    works.push_back(comm.async().recv(unisono::View(&got[tag], 1), UNISONO_ANY_SOURCE, tag));
  CHECK(!unisono::wait_any(works, std::chrono::milliseconds(1)) || world > 1);
  for (std::uint64_t tag = 0; tag < 3; tag++) comm.send(std::array{rank}, next, tag);
  const auto index = unisono::wait_any(works);
  CHECK(index && got[*index] == previous);
  unisono::wait_all(works);
  CHECK(got == std::vector<int>(3, previous));

  if (world > 1) {
    unisono::Group group;
    comm.send(std::array{7}, next, 9);
    comm.recv(unisono::View(&theirs, 1), previous, 9);
    group.end();
    CHECK(theirs == 7);
  }
  unisono::Group group;
  comm.all_reduce(x, UNISONO_SUM);
  auto all = group.end_async();
  all.wait();
  CHECK(x[0] == static_cast<double>(world) * world);
}

void failures(const Communicator& comm) {
  std::vector<float> x(4), y(5);
  Error error = thrown_by([&] { comm.all_reduce(x, y, UNISONO_SUM); });
  CHECK(error.status() == UNISONO_INVALID_ARGUMENT && !error.fatal() && !error.peer());
  error = thrown_by([&] { comm.broadcast(x, 99); });
  CHECK(std::string(error.what()).find("99") != std::string::npos);
  error = thrown_by([&] { comm.all_reduce(x, UNISONO_BAND); });
  CHECK(error.status() == UNISONO_UNSUPPORTED);
  error = thrown_by([&] { unisono::Config().set("timeuot", "3"); });
  CHECK(std::string(error.what()).find("timeout") != std::string::npos);
  error = thrown_by([&] { comm.all_gather_v(x, y, std::vector<std::size_t>(17)); });
  CHECK(std::string(error.what()).find("each rank") != std::string::npos);
  comm.check_alive();

  auto part = comm.split(0);
  CHECK(part && part->size() == comm.size());
  part->set_timeout(std::chrono::milliseconds(200));
  const int other = comm.rank() == 0 ? comm.size() - 1 : 0;
  std::vector<unisono::Work> works(2);
  works[1] = part->async().recv(x, other, 1);
  error = thrown_by([&] { unisono::wait_any(works); });
  CHECK(error.fatal() && !error.operation().empty() && error.index() == 1);
  works.clear();
  error = thrown_by([&] { unisono::wait_any(works); });
  CHECK(error.status() == UNISONO_INVALID_ARGUMENT && !error.index());
  error = thrown_by([&] { part->recv(x, other, 1); });
  CHECK(error.fatal());
  error = thrown_by([&] { part->check_alive(); });
  CHECK(!part->report().empty());
  CHECK(!comm.split(std::nullopt));

  // No rank has gone.
  auto left = comm.shrink();
  const auto [ranks, ended] = left.former();
  CHECK(left.size() == comm.size() && ranks[left.rank()] == comm.rank());
  CHECK(ended <= comm.ended());
  left.barrier();
  CHECK(left.newcomers().empty());
  auto masked = left.mask();
  CHECK(masked.size() == left.size() && masked.rank() == left.rank());
  CHECK(masked.living().size() == static_cast<std::size_t>(left.size()));

  const unisono::Candidate me;
  std::vector<char> mine(4096), all(mine.size() * comm.size());
  const std::string text = me.text();
  CHECK(text.size() < mine.size());
  std::copy(text.begin(), text.end(), mine.begin());
  left.all_gather(mine, all);
  std::vector<std::string> handles;
  for (int other = 0; other < comm.size(); ++other) {
    // In the opposite order.
    handles.insert(handles.begin(), all.data() + mine.size() * other);
  }
  const auto formed = me.form(handles, 7);
  CHECK(formed.rank() == comm.size() - 1 - comm.rank() && formed.size() == comm.size());
  formed.barrier();
  error = thrown_by([&] { me.form(handles, 7); });
  CHECK(error.status() == UNISONO_INVALID_ARGUMENT);
  error = thrown_by([&] { me.form({"none"}, 8); });
  CHECK(error.status() == UNISONO_INVALID_ARGUMENT);
  error = thrown_by([&] { left.grow(left.size()); });
  CHECK(error.status() == UNISONO_INVALID_ARGUMENT);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count > 1);
  const int rank = std::atoi(std::getenv("RANK")), world = std::atoi(std::getenv("WORLD_SIZE"));
  types();
  const std::string folder = arguments[1];
  Folder store(folder);
  {
    const unisono::Config config = std::move(unisono::Config().set("timeout", "30"));
    CHECK(config.value("timeout") == "30");
    auto comm = Communicator::from_store(store, rank, world, &config);
    CHECK(comm.rank() == rank && comm.size() == world);
    collectives(comm);
  }
  unisono::UniqueId id{};
  if (rank == 0) {
    id = unisono::make_unique_id();
    store.set("id", std::string(reinterpret_cast<const char*>(id.bytes), sizeof id.bytes));
  } else {
    const auto found = store.wait("id", std::chrono::seconds(20));
    CHECK(found && found->size() == sizeof id.bytes);
    std::memcpy(id.bytes, found->data(), sizeof id.bytes);
  }
  auto comm = Communicator::from_id(id, rank, world);
  work(comm);
  failures(comm);
  comm.barrier();
  comm = Communicator::from_url("file://" + folder + "/store", rank, world);
  comm.barrier();
  comm = Communicator::from_environment();
  comm.barrier();
  if (world > 1) {
    Broken broken;
    try {
      Communicator::from_store(broken, rank, world);
      CHECK(!"it cannot be joined");
    } catch (const std::logic_error& error) {
      CHECK(std::string(error.what()) == "no luck");
    }
  }
  return 0;
}
