// A Helia node that the tests talk to: a line of JSON in, a line of JSON out. Beside it lies what npm installed.
import { createInterface } from 'node:readline'
import { readFile, writeFile } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

// Node 22 has it, and Helia uses it; without it older ones do as well.
Promise.withResolvers ??= function () {
  const found = {}
  found.promise = new Promise((resolve, reject) => Object.assign(found, { resolve, reject }))
  return found
}
const installed = createRequire(process.argv[2] + '/package.json')
const load = async (name) => import(pathToFileURL(resolve(name)))
function resolve (name) {
  // Packages of modules alone have no entry that `require` would find.
  try { return installed.resolve(name) } catch { return `${process.argv[2]}/node_modules/${name}/dist/src/index.js` }
}
const { createHelia } = await load('helia')
const { unixfs } = await load('@helia/unixfs')
const { tcp } = await load('@libp2p/tcp')
const { noise } = await load('@libp2p/noise')
const { yamux } = await load('@libp2p/yamux')
const { identify } = await load('@libp2p/identify')
const { CID } = await load('multiformats/cid')
const { multiaddr } = await load('@multiformats/multiaddr')

// Nothing but TCP on this machine: no directory, no gateway, no relay.
const helia = createHelia({
  libp2p: {
    addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
    transports: [tcp()],
    connectionEncrypters: [noise()],
    streamMuxers: [yamux()],
    peerDiscovery: [],
    services: { identify: identify() }
  }
})
await helia.start()
const files = unixfs(helia)
const say = (told) => process.stdout.write(JSON.stringify(told) + '\n')
say({ addresses: helia.libp2p.getMultiaddrs().map(String) })
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line)
  const began = performance.now()
  try {
    if (asked.add !== undefined) {
      say({ cid: String(await files.addBytes(await readFile(asked.add))), seconds: (performance.now() - began) / 1000 })
    } else {
      await helia.libp2p.dial(multiaddr(asked.peer))
      const pieces = []
      for await (const piece of files.cat(CID.parse(asked.get), { signal: AbortSignal.timeout(asked.wait * 1000) })) {
        pieces.push(piece)
      }
      const seconds = (performance.now() - began) / 1000
      await writeFile(asked.into, Buffer.concat(pieces))
      say({ seconds })
    }
  } catch (error) {
    say({ error: String(error) })
  }
}
process.exit(0)
